"""An exception at any line of a step, and what must be left afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import trtspec
from trtspec import LLM, SamplingParams
from trtspec.api.outputs import Logprob
from trtspec.executor.request import Request

PACKAGE = Path(trtspec.__file__).parent
WINDOW = tuple(str(PACKAGE / name) for name in ("executor", "state", "guided"))
"""Packages whose lines are the window between a step's launch and its end."""


OUTSIDE = ("_start_over", "start_over", "taken", "end")
"""Functions that put things right afterwards."""


REQUESTS = [
    ([3, 4, 3, 4, 3], SamplingParams(max_tokens=6, ignore_eos=True)),
    ([9, 8, 7], SamplingParams(max_tokens=5, temperature=0.9, seed=5, ignore_eos=True)),
    ([5, 5, 6], SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True)),
    (list(range(20, 34)), SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True)),
    ([2, 90], SamplingParams(max_tokens=3, presence_penalty=0.7, ignore_eos=True)),
]


def begin(llm: LLM) -> list[Request]:
    """Requests in all states: the next step holds contexts and generations."""
    executor = llm.executor
    requests = [executor.enqueue(*request) for request in REQUESTS[:3]]
    executor.step()
    executor.step()
    return requests + [executor.enqueue(*request) for request in REQUESTS[3:]]


class RaiseAtLine:
    """Raises once, where (file, line) is reached, `after` so many times; or lists what is."""

    def __init__(self, place: tuple[str, int] | None, error: type[BaseException], after: int = 0):
        self.place, self.error, self.left = place, error, after
        self.seen: dict[tuple[str, int], None] = {}

    def __enter__(self) -> RaiseAtLine:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        inside = frame.f_code.co_filename.startswith(WINDOW)
        return self._line if inside and frame.f_code.co_name not in OUTSIDE else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.seen[place] = None
            self.left -= place == self.place
            if self.left < 0:
                sys.settrace(None)
                raise self.error("at " + ":".join(map(str, place)))
        return self._line


def finish(llm: LLM) -> None:
    llm.executor.run_until_done()


def prompt_entries(request: Request) -> list[dict[int, Logprob]]:
    """Those of all prompt tokens but the first, if they were asked for."""
    if request.prompt_logprobs is None:
        return []
    _, *entries = request.prompt_logprobs.entries(request.prompt_token_ids, 1)
    assert len(entries) == len(request.prompt_token_ids) - 1 and None not in entries
    return [entry for entry in entries if entry is not None]


def check(llm: LLM, requests: list[Request], expected: list[Request], where: object) -> None:
    executor = llm.executor
    for request, other in zip(requests, expected, strict=True):
        assert request.is_finished and request.num_in_flight == 0, where
        if request.finish_reason == "error":
            assert request.error, where
            continue
        assert request.output_token_ids == other.output_token_ids, where
        assert request.finish_reason == other.finish_reason, where
        assert (request.logprobs is None) == (other.logprobs is None), where
        pairs = [*zip(request.logprobs or [], other.logprobs or [], strict=True)]
        pairs += zip(prompt_entries(request), prompt_entries(other), strict=True)
        for got, wanted in pairs:
            assert list(got) == list(wanted), where
            for token, entry in wanted.items():
                assert got[token].logprob == pytest.approx(entry.logprob, abs=1e-4), where
    executor.kv_cache.check_integrity()
    assert executor.kv_cache.num_free_blocks == executor.kv_cache.num_blocks - 2, where
    assert not executor.book.live and not executor._pending and not executor.has_work, where
    assert sorted(executor.scheduler._free_slots) == [0, 1, 2, 3], where
