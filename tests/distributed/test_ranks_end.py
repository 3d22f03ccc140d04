"""Ranks live and die together: each way to fail ends all of them soon, and says why."""

from __future__ import annotations

import _thread
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrix import cpu_engine, full
from tiny import tiny_model_dir
from worlds import LONG, SHORT, SOON, close_all_worlds, is_alive, text_of, wait_until, world_of

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.config import EngineConfig
from trtspec.distributed import start
from trtspec.distributed.background import CALLS_AT_END, in_background, start_thread
from trtspec.distributed.peer import ALL_REDUCE_ENV_VAR
from trtspec.distributed.world import TIMEOUT_ENV_VAR, World
from trtspec.errors import CheckpointError, ConfigError, RankError
from trtspec.executor.ranks import LeadingRunner

starts_ranks_again = pytest.mark.skipif(
    not full(), reason="starts ranks again, which takes seconds each: make test-all"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return cpu_engine(model, None).generate([3, 4, 5], SHORT).outputs[0].token_ids


@pytest.fixture(autouse=True, scope="module")
def no_ranks_are_left() -> Iterator[None]:
    yield
    close_all_worlds()


def two_ranks(model: Path, **options: Any) -> LLM:
    return cpu_engine(model, None, tensor_parallel_size=2, max_seq_len=240, **options)


# -- one world, until its rank 0 fails ----------------------------------------------------------
@pytest.mark.slow
def test_an_interrupt_waits_for_the_step(
    model: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """From a directory in which a file is called as a module of Python is."""
    (tmp_path / "queue.py").write_text("raise ImportError('this is not the one')")
    monkeypatch.chdir(tmp_path)
    # A shell's background jobs ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with two_ranks(model) as llm:
        # The first call imports modules, and Python drops an interrupt within a lock of an import.
        assert text_of(llm) == expected
        for delay in (0.01, 0.05, 0.2):
            timer = threading.Thread()
            with pytest.raises(KeyboardInterrupt):
                for _ in range(100):
                    if not timer.is_alive():  # also dropped: one that comes in a finaliser
                        timer = threading.Timer(delay, _thread.interrupt_main)
                        timer.start()
                    llm.generate([9, 8, 7], LONG)
            timer.join()
            assert text_of(llm) == expected


def test_an_error_before_serving_leaves_the_ranks(
    model: Path, expected: list[int], tmp_path: Path
) -> None:
    with two_ranks(model) as llm:
        ranks = world_of(llm)
    other = tiny_model_dir(tmp_path)
    (other / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="There are no weights"):
        two_ranks(other)
    odd = tiny_model_dir(tmp_path, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ConfigError, match="num_attention_heads 3"):
        two_ranks(odd)
    with two_ranks(model) as llm:
        assert world_of(llm) is ranks
        assert text_of(llm) == expected


def test_a_refused_directory_leaves_the_ranks(
    model: Path, expected: list[int], tmp_path: Path
) -> None:
    """Rank 0 alone writes hidden states; an engine beside it goes on."""
    (tmp_path / "index.json").write_text("{}")
    config = SaveHiddenStatesDecodingConfig(
        output_directory=tmp_path, eagle3_layers_to_capture=[0, 1]
    )
    with two_ranks(model) as llm:
        with pytest.raises(CheckpointError, match="not an index of hidden states"):
            cpu_engine(model, config, tensor_parallel_size=2)
        assert text_of(llm) == expected


def test_a_failed_build_gives_back_what_others_may_want(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cluster. Ranks of this machine, and those of another engine, are kept."""
    with two_ranks(model) as llm:
        world, closed = world_of(llm), []
        monkeypatch.setattr(world, "_release", lambda: None)
        monkeypatch.setattr(world, "close", lambda: closed.append(world))
        with pytest.raises(ConfigError, match="max_num_tokens"):
            two_ranks(model, max_num_tokens=1)
        assert not closed
    assert closed == [world]  # with its last engine
    with pytest.raises(ConfigError, match="max_num_tokens"):
        two_ranks(model, max_num_tokens=1)
    assert closed == [world, world]


def test_a_world_has_threads_for_the_end_of_python(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since Python 3.12 none can start then, and an engine that was not shut down ends then."""
    two_ranks(model)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        ended = [in_background(lambda: None) for _ in range(CALLS_AT_END)]
        assert all(end.wait(10) for end in ended)
    for _ in ended:
        start_thread()


def test_engines_share_the_ranks(model: Path, expected: list[int]) -> None:
    first, second = two_ranks(model), two_ranks(model, overlap=False)
    ranks = world_of(first)
    assert world_of(second) is ranks and ranks.num_engines == 2
    streams = first.generate_stream([3, 4, 5], SHORT), second.generate_stream([3, 4, 5], SHORT)
    for _ in range(8):
        for stream in streams:
            next(stream, None)
    with pytest.raises(ConfigError, match="has an engine over 2 ranks"):
        cpu_engine(model, None, tensor_parallel_size=3)
    del second, streams, stream
    gc.collect()
    assert ranks.num_engines == 1 and len(ranks.dropped) == 1  # released with the next message
    assert text_of(first) == expected
    assert not ranks.dropped
    first.shutdown()
    first.shutdown()
    assert ranks.num_engines == 0


def test_a_rank_that_cannot_load_is_named(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 finds a draft model that rank 1 does not."""
    from trtspec.executor import build

    original = build._without_host_code
    config = DraftTargetDecodingConfig(max_draft_len=2, speculative_model=model)

    def elsewhere(engine: EngineConfig) -> EngineConfig:
        other = replace(config, speculative_model=model / "elsewhere")
        return replace(original(engine), speculative_config=other)

    monkeypatch.setattr(build, "_without_host_code", elsewhere)
    with pytest.raises(RankError, match=r"Rank 1: .*elsewhere"):
        cpu_engine(model, config, tensor_parallel_size=2)
    monkeypatch.undo()
    with two_ranks(model) as llm:
        assert text_of(llm) == expected


def test_a_request_is_preempted_for_blocks_of_its_own_rank(model: Path) -> None:
    """Each rank has 5 blocks of 8, of which its two requests come to need 8."""
    with two_ranks(model, enable_attention_dp=True, pool=40, page=8) as llm:
        executor = llm.executor
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        requests = [executor.enqueue([3, 4, 5, i], params) for i in range(4)]
        owner_of, choose = executor.kv_cache.owner_of, executor.scheduler._youngest_beside
        owners: list[tuple[Any, ...]] = []

        def noted(short: Any) -> Any:
            victims = choose(short)
            owners.append(tuple(owner_of(r.request_id) for r in [short, *victims]))
            return victims

        executor.scheduler._youngest_beside = noted  # type: ignore[method-assign]
        executor.run_until_done()
        executor.kv_cache.check_integrity()
        assert executor.kv_cache.block_tables([])[0].shape[0] == 0  # as captures of prompts ask
        assert {pair[0] for pair in owners} == {0, 1}
        assert all(len(pair) == 2 and pair[0] == pair[1] for pair in owners)
        assert all(len(request.output_token_ids) == 24 for request in requests)


@pytest.mark.slow
def test_an_error_of_rank_0_alone_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that reads as if another rank were gone."""
    llm = two_ranks(model)

    def broken(*_: Any) -> None:
        raise RuntimeError("NCCL error: unhandled")

    monkeypatch.setattr(llm.executor.runner.step, "run", broken)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(RankError, match="NCCL error: unhandled"):
            text_of(llm)
    assert time.monotonic() - started < SOON
    llm.shutdown()
    assert not hasattr(llm.executor.runner.step, "target")  # the memory is free for another


# -- each ends a world --------------------------------------------------------------------------
@pytest.mark.slow
def test_a_killed_rank_ends_the_engine(model: Path, expected: list[int]) -> None:
    llm = two_ranks(model)
    follower = world_of(llm).followers[0]
    stream = llm.generate_stream([3, 4, 5], LONG)
    next(stream)
    follower.kill()
    started = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 1 is gone, with exit code -9"):
        for _ in stream:
            pass
    assert time.monotonic() - started < SOON
    with pytest.raises(RankError, match="Rank 1 is gone"):  # and stays at its end
        llm.generate([3], SHORT)
    llm.shutdown()
    with two_ranks(model) as again:  # with new ranks
        assert text_of(again) == expected


@starts_ranks_again
def test_the_end_of_a_rank_is_the_reason_not_that_others_lost_it(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, num_attention_heads=8)
    llm = cpu_engine(path, None, tensor_parallel_size=4, max_seq_len=240)
    stream = llm.generate_stream([3, 4, 5], LONG)
    next(stream)
    world_of(llm).followers[1].kill()
    with pytest.raises(RankError, match=r"Rank 2 is gone, with exit code -9"):
        for _ in stream:
            pass


def test_the_first_error_of_a_rank_is_shown(model: Path) -> None:
    llm = two_ranks(model)
    llm.executor.runner.link.tell("no_such_method")  # type: ignore[attr-defined]
    started = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 1 failed: AttributeError: .*no_such_method"):
        for _ in range(50):
            llm.generate([3, 4], LONG)
    assert time.monotonic() - started < SOON


@pytest.mark.slow
def test_ranks_that_part_are_noticed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in a collective that rank 1 does not know of."""
    close_all_worlds()  # one that is there has read the variable
    monkeypatch.setenv(TIMEOUT_ENV_VAR, "60")
    world = world_of(two_ranks(model))
    assert world.timeout == 60
    world.timeout = 1.0  # now that the ranks are built, which may take longer
    with pytest.raises(RankError, match="did not finish a step in 1 s"), world.together():
        world.comm.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True"),
        ({"tensor_parallel_size": 2, "moe_expert_parallel_size": 3}, "does not divide"),
        ({"backend": "mpi"}, "backend='mpi'"),
        ({"backend": "torchrun"}, "torchrun did not start this process"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2.*one graph"),
        (
            {
                "enable_attention_dp": True,
                "speculative_config": NGramDecodingConfig(max_verified_drafts=5),
            },
            "max_verified_drafts=5 with enable_attention_dp",
        ),
    ],
)
def test_what_cannot_be_is_refused(model: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(model, device="cpu", **options)


def test_a_rank_that_cannot_start_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_all_worlds()
    monkeypatch.setattr(start, "FOLLOWER", "no_such_module")
    with pytest.raises(RankError, match=r"Rank 1 is gone, with exit code 1\."):
        two_ranks(model)


def test_ray_is_optional(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pip install 'trtspec\[ray\]'"):
        two_ranks(model, backend="ray")


def test_masks_are_given_back_after_a_failure_too() -> None:
    """Of grammars. Models, slots and graphs were, and these stayed until the engine was gone."""
    runner: Any = object.__new__(LeadingRunner)
    released: list[str] = []
    runner._finalizer = SimpleNamespace(detach=lambda: None)
    runner.world = SimpleNamespace(failure="a rank is lost", close_if_idle=lambda: None)
    runner.step = SimpleNamespace(release_memory=lambda: released.append("step"))
    vars(runner).update(graphs="graphs", masks="masks")
    runner.release_memory()
    assert released == ["step"] and not {"graphs", "masks"} & set(vars(runner))


def test_a_world_waits_for_its_watching_thread() -> None:
    """In C++ when Python ends, it would abort the process."""
    world = object.__new__(World)
    world.is_closed, world.rank, world.failure, world.followers = False, 0, "none is left", []
    world.runners, world._release = weakref.WeakSet(), None
    world._watcher = threading.Thread(target=time.sleep, args=(0.5,), daemon=True)
    world._watcher.start()
    world.close()
    assert not world._watcher.is_alive()


# -- processes of their own --------------------------------------------------------------------
SCRIPT = """
import sys
from trtspec import LLM, DraftTargetDecodingConfig, SamplingParams
from trtspec.config import EngineConfig
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_seq_len=240, **eval(sys.argv[2]))
world = llm.executor.runner.world
print([follower.pid for follower in world.followers], flush=True)
params = SamplingParams(max_tokens=int(sys.argv[3]), ignore_eos=True)
print(llm.generate([3, 4, 5], params).outputs[0].token_ids, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_ranks_follow_a_killed_leader(model: Path, script: Path) -> None:
    command = [sys.executable, str(script), str(model), "{'tensor_parallel_size': 2}", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        (follower,) = json.loads(leader.stdout.readline())
        leader.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(follower))


@pytest.mark.slow
def test_a_script_under_torchrun(model: Path, script: Path, expected: list[int]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # any free port
    done = subprocess.run(
        [*command, str(script), str(model), "{}", "8"],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[], expected]


@starts_ranks_again
@pytest.mark.parametrize(
    ("stage", "error"), [("_load", KeyboardInterrupt()), ("_kv_cache", ConfigError("no memory"))]
)
def test_what_ends_the_build_on_rank_0_alone_ends_the_ranks(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch,
    stage: str, error: BaseException,
) -> None:  # fmt: skip
    """An interrupt while it loads, or memory that ends on it alone."""
    from trtspec.executor import build

    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(build, stage, failing)
    with pytest.raises(type(error), match=str(error)):
        two_ranks(model)
    monkeypatch.undo()
    with two_ranks(model) as llm:
        assert text_of(llm) == expected


@starts_ranks_again
def test_a_wrong_variable_is_refused_before_ranks_start(
    model: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    close_all_worlds()
    for name in (TIMEOUT_ENV_VAR, ALL_REDUCE_ENV_VAR):
        monkeypatch.setenv(name, "soon")
        with pytest.raises(ConfigError, match=f"{name}='soon'"):
            two_ranks(model)
        monkeypatch.delenv(name)
    with two_ranks(model) as llm:
        assert text_of(llm) == expected
