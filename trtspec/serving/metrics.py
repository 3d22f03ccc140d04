"""`StepMetrics`: counts what steps and requests bring, in plain numbers.

The thread that steps writes, any thread reads; there is no lock. A reader sees each number whole,
and perhaps some of a step's numbers before the others.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Literal, NamedTuple

from ..executor.observer import StepFacts
from ..executor.request import Request
from ..executor.results import RequestResult

FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""A finish_reason of ours -> vLLM's."""

# vLLM's bounds, and finer ones below: a step of a small model takes less than a millisecond.
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
STEP_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = tuple(float(1 << n) for n in range(15))
REQUEST_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
)  # fmt: skip
HISTORY_SECONDS = 180
RECENT_STEPS = 64  # of one batch size, whose median is its step time
LEAST_STEPS = 8  # for a median: a request's first step is plain in some modes

StepKind = Literal["context", "generation", "mixed"]


class Histogram:
    """Counts of values by bucket. A bucket holds the values up to its bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[int]:
        return list(accumulate(list(self.counts)))


@dataclass
class Second:
    """What one second of the clock brought."""

    at: int  # of time.perf_counter()
    accepted_lens: list[int]  # [K+1] steps of a request, by accepted drafts; where drafts were due
    generated_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0


class Timeline(NamedTuple):
    """When a request came, was queued, began and got its first token; 0.0 before that."""

    arrived: float
    queued: float
    started: float = 0.0
    first_token: float = 0.0


@dataclass
class StepTimes:
    """Times of generation steps by batch size, rounded up to a power of two."""

    plain: dict[int, deque[float]] = field(default_factory=dict)
    speculative: dict[int, deque[float]] = field(default_factory=dict)
    last_batch: int = 0

    def add(self, num_generations: int, num_drafts: int, seconds: float) -> None:
        batch = 1 << (num_generations - 1).bit_length()
        kind = self.speculative if num_drafts else self.plain
        if batch not in kind:
            kind[batch] = deque(maxlen=RECENT_STEPS)
        kind[batch].append(seconds)
        self.last_batch = batch

    @staticmethod
    def typical(kind: dict[int, deque[float]]) -> dict[int, float]:
        """Returns the median of the last steps, of each batch size of which enough were timed."""
        copies = {batch: list(times) for batch, times in list(kind.items())}
        return {b: median(times) for b, times in copies.items() if len(times) >= LEAST_STEPS}


class StepMetrics:
    """A `StepObserver`. Totals since it was made; nothing resets them.

    Args:
        max_draft_len: K of the engine, 0 without a drafter.
    """

    def __init__(self, max_draft_len: int):
        self.max_draft_len = max_draft_len
        self.prompt_tokens = self.generated_tokens = self.drafted_output_tokens = 0
        self.num_draft_tokens = 0
        self.accepted_lens = [0] * (max_draft_len + 1)
        """Generation steps of a request that had drafts to verify, by how many were accepted."""
        self.prefix_queries = self.prefix_hits = 0
        self.finished: Counter[str] = Counter()
        self.first_token_seconds = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token_seconds = Histogram(STEP_SECONDS)
        self.e2e_seconds = Histogram(REQUEST_SECONDS)
        self.queue_seconds = Histogram(REQUEST_SECONDS)
        self.prefill_seconds = Histogram(REQUEST_SECONDS)
        self.decode_seconds = Histogram(REQUEST_SECONDS)
        self.inference_seconds = Histogram(REQUEST_SECONDS)
        self.token_seconds = Histogram(STEP_SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.request_prompt_tokens = Histogram(REQUEST_TOKENS)
        self.request_generated_tokens = Histogram(REQUEST_TOKENS)
        self.step_seconds: dict[tuple[StepKind, bool], Histogram] = {}  # by kind, and by graph
        self.step_times = StepTimes()
        self.history: deque[Second] = deque(maxlen=HISTORY_SECONDS)
        self._timelines: dict[int, Timeline] = {}  # by request
        self._last_token: dict[int, float] = {}  # when each request got its last token

    @property
    def num_drafts(self) -> int:
        """Returns how often a request's drafts were verified."""
        return sum(self.accepted_lens)

    @property
    def accepted_per_position(self) -> list[int]:
        """Returns how often draft 1 … K was accepted."""
        return accepted_per_position(list(self.accepted_lens))

    # -- requests ------------------------------------------------------------------------------
    def on_request_queued(self, request: Request) -> None:
        now = time.perf_counter()
        self._timelines[request.request_id] = Timeline(request.arrived or now, now)

    def on_request_started(self, request: Request) -> None:
        line = self._timelines.get(request.request_id)
        if line is None or line.started:  # it was preempted, and begins again
            return
        now = time.perf_counter()
        self._timelines[request.request_id] = line._replace(started=now)
        self.queue_seconds.add(now - line.queued)
        self.prefix_queries += request.num_context_tokens
        self.prefix_hits += request.num_reused

    def on_request_finished(self, request: Request) -> None:
        line = self._timelines.pop(request.request_id, None)
        last = self._last_token.pop(request.request_id, 0.0)
        self.finished[FINISHED_REASONS.get(str(request.finish_reason), "error")] += 1
        self.request_prompt_tokens.add(len(request.prompt_token_ids))
        count = len(request.output_token_ids)
        self.request_generated_tokens.add(count)
        if line is None:
            return
        now = time.perf_counter()
        self.e2e_seconds.add(now - line.arrived)
        if not line.first_token:
            return
        self.prefill_seconds.add(line.first_token - line.started)
        self.decode_seconds.add(last - line.first_token)
        self.inference_seconds.add(last - line.started)
        if count > 1:
            self.token_seconds.add((last - line.first_token) / (count - 1))

    # -- steps ---------------------------------------------------------------------------------
    def on_step(self, facts: StepFacts) -> None:
        now, last_token = facts.ended, self._last_token
        lens = [0] * (self.max_draft_len + 1)
        generated = prompt = drafted = asked = 0
        since, waited = now, 0  # requests in a row mostly share the time of their last token
        for result, count in facts.results:
            generated += count
            request_id = result.request.request_id
            if result.is_generation:
                before = last_token.get(request_id, now)
                if before != since:
                    self.inter_token_seconds.add(now - since, waited)
                    since, waited = before, 0
                waited += 1
                accepted = result.num_accepted
                if accepted:
                    drafted += accepted if accepted < count else count
                if result.num_asked:
                    asked += result.num_asked
                    lens[accepted] += 1
            else:
                prompt += self._first_token(result, now)
            last_token[request_id] = now
        self.inter_token_seconds.add(now - since, waited)
        self.generated_tokens += generated
        self.prompt_tokens += prompt
        self.drafted_output_tokens += drafted
        self.num_draft_tokens += asked
        if generated or prompt:
            self.step_tokens.add(generated + prompt)
        second = self._second(now)
        second.generated_tokens += generated
        second.prompt_tokens += prompt
        second.steps += 1
        if asked:
            for accepted, steps in enumerate(lens):
                self.accepted_lens[accepted] += steps
                second.accepted_lens[accepted] += steps
        self._time(facts)

    def _first_token(self, result: RequestResult, now: float) -> int:
        """Notes a request's first token. Returns the tokens of its prompt."""
        request = result.request
        line = self._timelines.get(request.request_id)
        if line is not None:
            self.first_token_seconds.add(now - line.arrived)
            self._timelines[request.request_id] = line._replace(first_token=now)
        return len(request.prompt_token_ids)

    def _time(self, facts: StepFacts) -> None:
        num_contexts = num_generations = 0
        is_replay = True
        for step in facts.timed:
            num_contexts += len(step.batch.contexts)
            num_generations += len(step.batch.generations)
            is_replay &= step.is_replay
        if not (num_contexts or num_generations):
            return
        kind: StepKind = "generation"
        if num_contexts:
            kind = "mixed" if num_generations else "context"
        histogram = self.step_seconds.get((kind, is_replay))
        if histogram is None:
            histogram = self.step_seconds[kind, is_replay] = Histogram(STEP_SECONDS)
        histogram.add(facts.seconds)
        if kind == "generation" and len(facts.timed) == 1:
            self.step_times.add(num_generations, facts.timed[0].num_drafts, facts.seconds)

    def _second(self, now: float) -> Second:
        at = int(now)
        if not self.history or self.history[-1].at != at:
            self.history.append(Second(at, [0] * (self.max_draft_len + 1)))
        return self.history[-1]


def accepted_per_position(accepted_lens: Iterable[int]) -> list[int]:
    """Returns how often draft 1 … K was accepted, of a histogram over 0 … K accepted drafts."""
    at_least = list(accumulate(reversed(list(accepted_lens))))[::-1]
    return at_least[1:]
