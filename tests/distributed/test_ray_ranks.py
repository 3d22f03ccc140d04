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

from trtspec import LLM, SamplingParams
from trtspec.distributed import ray_ranks
from trtspec.distributed import world as worlds
from trtspec.errors import ConfigError, RankError

ray = pytest.importorskip("ray", reason="backend='ray' is optional: pip install 'trtspec[ray]'")

SOON = 10.0
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray of three CPUs, initialised by the caller."""
    for world in list(worlds._worlds):
        world.close()
    ray.init(
        address="local", num_cpus=3, include_dashboard=False, object_store_memory=80 * 2**20,
        log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After each test Ray runs, and all that it has is free."""
    yield
    for world in list(worlds._worlds):
        world.close()
    assert ray.is_initialized()
    _wait_until(lambda: ray.available_resources().get("CPU") == 3 and not _live_actors())


def _live_actors() -> list[Any]:
    from ray._private.state import actors

    return [a for a in actors().values() if a["State"] != "DEAD"]


def _wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ray_engine(model: Path, size: int = 2, **options: Any) -> LLM:
    return cpu_engine(
        model, None, tensor_parallel_size=size, backend="ray", max_seq_len=240, **options
    )


def world_of(llm: LLM) -> worlds.World:
    return llm.executor.runner.world  # type: ignore[attr-defined]


def test_greedy_equals_one_process(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSPEC_CHECK_RANKS", "1")  # the actors take it over
    prompts, params = random_prompts(5), SamplingParams(max_tokens=24, ignore_eos=True)
    expected = cpu_engine(model, None, max_seq_len=240).generate(prompts, params)
    with ray_engine(model) as llm:
        outputs = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
