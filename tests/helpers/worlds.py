"""What tests look at of an engine's ranks: its world, its processes, and whether they still run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trtspec import LLM, SamplingParams
from trtspec.distributed.start import _worlds
from trtspec.distributed.world import World

SOON = 10.0
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


def world_of(llm: LLM) -> World:
    return llm.executor.runner.world  # type: ignore[attr-defined]


def text_of(llm: LLM) -> list[int]:
    return llm.generate([3, 4, 5], SHORT).outputs[0].token_ids


def close_all_worlds() -> None:
    for world in list(_worlds):
        world.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)
