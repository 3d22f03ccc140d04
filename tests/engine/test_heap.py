"""While steps run the garbage collector leaves out what was there before, and no longer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import tiny_model_dir

from trtspec import LLM, AsyncLLM, SamplingParams
from trtspec.executor.request import Request
from trtspec.frontend.heap import IMMORTAL, HeapAside

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(HeapAside, "_num_users", 0)
    monkeypatch.setattr(HeapAside, "_is_callers", False)
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(tiny_model_dir(tmp_path), device="cpu", dtype="float32", max_seq_len=32)


def is_aside() -> bool:
    return gc.get_freeze_count() > IMMORTAL


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def look_at(llm: LLM) -> list[tuple[bool, bool]]:
    """Returns a list that after each token gets whether the heap is aside, and whether a cycle that
    was made just then was collected."""
    seen: list[tuple[bool, bool]] = []

    def look(request: Request) -> bool:
        garbage = weakref.ref(Cycle())
        gc.collect()
        seen.append((is_aside(), garbage() is None))
        return False

    llm.executor.stop_check = look
    return seen


def test_generate_sets_it_aside(llm: LLM) -> None:
    seen = look_at(llm)
    for _ in range(2):
        assert not is_aside()
        llm.generate([[1, 2], [3]], PARAMS)
    assert seen == [(True, True)] * 16
    assert not is_aside()


def test_what_python_froze_is_not_the_programs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.12, which freezes what lives for ever."""
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: max(375, count()))
    seen = look_at(llm)
    for _ in range(2):
        llm.generate([1, 2], PARAMS)
        assert gc.get_freeze_count() == 375
    assert seen == [(True, True)] * 8


def test_an_interrupt_gives_it_back(llm: LLM) -> None:
    def interrupt(request: Request) -> bool:
        raise KeyboardInterrupt

    llm.executor.stop_check = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 2], PARAMS)
    assert not is_aside()


def test_what_the_program_froze_stays(llm: LLM) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    for _ in range(2):
        llm.generate([1, 2], PARAMS)
        assert gc.get_freeze_count() == pytest.approx(before, rel=0.01) and before > IMMORTAL


def test_the_last_user_gives_it_back() -> None:
    first, second = HeapAside(), HeapAside()
    first.begin()
    first.begin()
    second.begin()
    first.end()
    first.end()
    assert is_aside()
    second.end()
    assert not is_aside()


def test_an_engine_thread_gives_it_back_when_it_rests(llm: LLM) -> None:
    seen = look_at(llm)

    async def serve() -> None:
        async with AsyncLLM(llm) as engine:
            for _ in range(2):
                async for _ in engine.generate([1, 2], PARAMS):
                    pass
                for _ in range(1000):
                    if is_aside():
                        await asyncio.sleep(0.01)
                assert not is_aside()

    asyncio.run(serve())
    assert seen == [(True, True)] * 8
