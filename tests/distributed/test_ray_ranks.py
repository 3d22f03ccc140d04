"""Ranks that are Ray actors, on a Ray of this machine: same tokens, one end, nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matrix import cpu_engine
from oracle import random_prompts
from tiny import tiny_model_dir
from worlds import LONG, SHORT, SOON, close_all_worlds, is_alive, text_of, wait_until, world_of

from trtspec import LLM, SamplingParams
from trtspec.distributed import ray_ranks
from trtspec.distributed.world import leave_groups
from trtspec.errors import ConfigError, RankError

ray = pytest.importorskip("ray", reason="backend='ray' is optional: pip install 'trtspec[ray]'")

CPUS, GPUS = 4, 3  # Ray does not look for the GPUs that it is told of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny_model_dir(path, seed=1, num_attention_heads=8)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return cpu_engine(model, None).generate([3, 4, 5], SHORT).outputs[0].token_ids


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """A Ray that the caller has initialised."""
    close_all_worlds()
    ray.init(
        address="local", num_cpus=CPUS, num_gpus=GPUS, include_dashboard=False,
        object_store_memory=80 * 2**20, log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test Ray still runs, and all that it has is free."""
    yield
    close_all_worlds()
    leave_groups()
    assert_all_is_free()


def assert_all_is_free() -> None:
    assert ray.is_initialized()
    free = ray.available_resources
    wait_until(lambda: (free().get("CPU"), free().get("GPU")) == (CPUS, GPUS))
    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups)


def ray_engine(model: Path, size: int = 2, **options: Any) -> LLM:
    return cpu_engine(
        model, None, tensor_parallel_size=size, backend="ray", max_seq_len=240, **options
    )


def pids_of(llm: LLM) -> list[int]:
    return [follower.pid for follower in world_of(llm).followers]  # type: ignore[attr-defined]


def test_greedy_equals_one_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CHECK_RANKS", "1")  # the actors take it over
    prompts, params = random_prompts(5), SamplingParams(max_tokens=24, ignore_eos=True)
    expected = cpu_engine(model, None, max_seq_len=240).generate(prompts, params)
    with ray_engine(model) as llm:
        outputs = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


def test_shutdown_leaves_no_actors(model: Path, expected: list[int]) -> None:
    first, second = ray_engine(model), ray_engine(model)
    assert world_of(second) is world_of(first)
    pids = pids_of(first)
    first.shutdown()
    assert text_of(second) == expected  # the ranks are still wanted
    with pytest.raises(ConfigError, match="has an engine over 2 ranks of 'ray'"):
        cpu_engine(model, None, tensor_parallel_size=2, backend="mp")
    second.shutdown()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert_all_is_free()
    second.shutdown()
    with ray_engine(model) as again:  # with new ranks
        assert pids_of(again) != pids
        assert text_of(again) == expected


def test_an_engine_that_cannot_be_built_leaves_no_actors(model: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be cut"):
        ray_engine(model, size=3)
    assert_all_is_free()


def test_a_killed_actor_ends_the_engine(model: Path, expected: list[int]) -> None:
    llm = ray_engine(model, size=4)
    pids = pids_of(llm)
    stream = llm.generate_stream([3, 4, 5], LONG)
    next(stream)
    os.kill(pids[1], signal.SIGKILL)
    started = time.monotonic()
    said = rf"Rank 2 is gone, pid {pids[1]} on .*: ActorDiedError: .*worker process has died"
    with pytest.raises(RankError, match=said):
        for _ in stream:
            pass
    assert time.monotonic() - started < SOON
    wait_until(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RankError, match="Rank 2 is gone"):  # and stays at its end
        llm.generate([3], SHORT)
    llm.shutdown()
    assert_all_is_free()
    with ray_engine(model) as again:
        assert text_of(again) == expected


def test_the_first_error_of_a_rank_is_shown(model: Path) -> None:
    llm = ray_engine(model)
    llm.executor.runner.link.tell("no_such_method")  # type: ignore[attr-defined]
    started = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 1 failed: AttributeError: .*no_such_method"):
        for _ in range(50):
            llm.generate([3, 4], LONG)
    assert time.monotonic() - started < SOON


def test_a_rank_that_cannot_join_says_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Apart(ray_ranks.RankActor):
        def serve(self, environment: dict[str, str], device: str, num_threads: int) -> None:
            raise OSError("no route to host")

    monkeypatch.setattr(ray_ranks, "RankActor", Apart)
    started = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 1 is gone, .*OSError: no route to host"):
        ray_engine(model)
    assert time.monotonic() - started < SOON


def test_too_few_cpus(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "PLACEMENT_TIMEOUT", 1.0)
    started = time.monotonic()
    said = r"tensor_parallel_size=8 needs 8 CPUs.* cluster has 4, of which 4 are free .*4 CPUs, 3 "
    with pytest.raises(ConfigError, match=said):
        ray_engine(model, size=8)
    assert time.monotonic() - started < SOON


def test_a_host_outside_of_the_cluster(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "198.51.100.7")
    with pytest.raises(ConfigError, match=r"on 198\.51\.100\.7, which is no node"):
        ray_engine(model)


def test_each_rank_has_a_gpu_of_its_own() -> None:
    places = ray_ranks._Places(ray, is_ours=False)
    places.reserve(3, "cuda")
    spots = places.fill(3, "cuda")
    assert sorted(gpu for spot in spots for gpu in spot.gpu_ids) == [0, 1, 2]
    assert "GPU" not in ray.available_resources()
    assert ray.available_resources()["CPU"] == CPUS
    places.release()


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [(3, None, 3), (3, "2,3", 1), ("3", "3", 0), ("GPU-b", "GPU-a, GPU-b", 1), (1, "2,3", None)],
)
def test_the_gpu_of_this_process(
    monkeypatch: pytest.MonkeyPatch, assigned: int | str, visible: str | None, index: int | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if index is not None:
        assert ray_ranks._gpu_of_this_process([assigned]) == index
        return
    with pytest.raises(ConfigError, match=r"assigned GPU 1 .* CUDA_VISIBLE_DEVICES='2,3' hides"):
        ray_ranks._gpu_of_this_process([assigned])


# -- processes of their own --------------------------------------------------------------------
SCRIPT = """
import sys
from trtspec import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_seq_len=240, tensor_parallel_size=2,
          backend="ray")
print([follower.pid for follower in llm.executor.runner.world.followers], flush=True)
params = SamplingParams(max_tokens=int(sys.argv[2]), ignore_eos=True)
print(llm.generate([3, 4, 5], params).outputs[0].token_ids, flush=True)
"""


def start_script(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts the script on the Ray of these tests, which it must find and initialise."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    address = ray.get_runtime_context().gcs_address
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "RAY_ADDRESS": address},
    )  # fmt: skip


def test_ranks_follow_a_killed_leader(model: Path, tmp_path: Path) -> None:
    with start_script(tmp_path, str(model), "200") as leader:
        assert leader.stdout is not None
        (follower,) = json.loads(leader.stdout.readline())
        leader.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(follower))


def test_a_script_that_just_ends(model: Path, tmp_path: Path, expected: list[int]) -> None:
    with start_script(tmp_path, str(model), "8") as leader:
        output, _ = leader.communicate(timeout=60)
    (follower,), tokens = map(json.loads, output.splitlines())
    assert leader.returncode == 0 and tokens == expected
    wait_until(lambda: not is_alive(follower))
