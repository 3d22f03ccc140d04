r"""What a draft length that chooses itself loses, and to what: simulated, with an H200's times.

    python benchmarks/auto_draft_len_simulated.py

The cells are those of `auto_draft_len.py` with SmolLM2-135M: requests of up to 128 tokens, one turn
that is not counted and two that are. Each request has its own acceptance, around that of the
package's EAGLE-3 head. Step times are measured ones (docs/log.md), a capture takes `--capture`
seconds. Auto is simulated three times: any length may be captured at any time (`any time`), one is
captured once that would have paid (`once it pays`), all are captured before (`before`); with the
captures of counted turns in brackets.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trtspec import NGramDecodingConfig, SamplingParams
from trtspec.executor.draft_lens import auto_draft_len
from trtspec.executor.draft_lens.auto_draft_len import AutoDraftLen, Launches
from trtspec.executor.draft_lens.step_costs import StepCosts, StepSeconds, StepShape
from trtspec.executor.results import Outcomes

K, TOKENS = 4, 128
ONE = 0.581, 0.655, 0.70, 0.735, 0.775  # ms a step with one request, by K
MANY = 0.86, 1.16, 1.23, 1.31, 1.39  # with 32
BETWEEN = {1: 0.0, 2: 0.08, 4: 0.18, 8: 0.35, 16: 0.6, 24: 0.85, 32: 1.0}  # by bucket
RATES = {False: (0.62, 0.635, 0.64, 0.65), True: (0.48, 0.48, 0.47, 0.45)}  # by `is_sampled`
SPREAD = 0.6  # of the logits of acceptance, between requests
MEASURED = 1, 2, 4, 8, 16, 32  # buckets that are timed at start
WAYS = "any time", "once it pays", "before"
Captured = set[tuple[int, int, bool]]  # bucket, K, whether sampled


def seconds_of(bucket: int, k: int, is_sampled: bool) -> float:
    share = BETWEEN[bucket]
    ms = ONE[k] * (1 - share) + MANY[k] * share
    if is_sampled:
        ms += 0.01 + 0.06 * share + k * (0.005 + 0.04 * share)
    return 1e-3 * ms


def bucket_of(count: int) -> int:
    return next(size for size in BETWEEN if size >= count)


class Fixed:
    """Drafts the same number in each step."""

    def __init__(self, k: int):
        self.k = k

    def of(self, batch: Any, part: Any) -> int:
        return self.k

    def add_outcomes(self, outcomes: Outcomes, batch: Any) -> None:
        pass

    def end_step(self, *steps: Any, **facts: Any) -> None:
        pass


class Simulated:
    """One engine, whose host is never late."""

    def __init__(self, chooser: Any, captured: Captured, capture: float, seed: int):
        self.now, self.chooser, self.captured, self.capture = 0.0, chooser, captured, capture
        self.rng = random.Random(seed)
        self.in_flight: list[tuple[Any, list[tuple[Any, int, int]]]] = []
        self.num_captures = 0

    def turn(self, batch: int, is_sampled: bool, count: int) -> float:
        """Returns tokens per second."""
        waiting = deque(_request(i, is_sampled) for i in range(count))
        running: list[Any] = []
        made, began_at = 0, self.now
        while waiting or running:
            began, was_in_flight = self.now, bool(self.in_flight)
            generations, started = list(running), []
            while waiting and len(running) < batch:
                started.append(waiting.popleft())
                running.append(started[-1])
            launched = []
            if generations:
                launched.append(self._launch(generations, is_sampled))
            if started:
                launched.append(SimpleNamespace(batch=_batch(started, contexts=started)))
                self.in_flight.append((launched[-1], [(r, -1, 0) for r in started]))
                self.now += 0.0014 + 0.0002 * len(started)
            read = []
            while len(self.in_flight) > len(launched):
                step, results = self.in_flight.pop(0)
                read.append(step)
                outcomes = Outcomes([], [], [])
                made += sum(self._read(outcomes, *result) for result in results)
                self.chooser.add_outcomes(outcomes, step.batch)
            running = [r for r in running if r.left > 0]
            self.chooser.end_step(launched, read, began, is_in_flight=was_in_flight)
        return made / (self.now - began_at)

    def _launch(self, requests: list[Any], is_sampled: bool) -> Any:
        batch = _batch(requests, num_sampled=len(requests) * is_sampled)
        k, bucket = self.chooser.of(batch, batch), bucket_of(len(requests))
        if (bucket, k, is_sampled) not in self.captured:
            self.captured.add((bucket, k, is_sampled))
            self.num_captures += 1
            self.now += self.capture
        self.now += seconds_of(bucket, k, is_sampled) * self.rng.gauss(1, 0.01)
        results = []
        for request in requests:
            verified, accepted = min(request.asked, k), 0
            while accepted < verified and self.rng.random() < request.rates[accepted]:
                accepted += 1
            results.append((request, verified, accepted))
            request.asked = k
        step = SimpleNamespace(batch=batch, draft_len=k, waited=None)
        self.in_flight.append((step, results))
        return step

    def _read(self, outcomes: Outcomes, request: Any, verified: int, accepted: int) -> int:
        if request.left <= 0:
            return 0
        count = min(accepted + 1, request.left)
        request.left -= count
        if verified >= 0:
            outcomes.requests.append(request)
            outcomes.num_asked.append(verified)
            outcomes.num_accepted.append(accepted)
        return count


def _request(number: int, is_sampled: bool) -> Any:
    rng = random.Random(number)
    shift = rng.gauss(0, SPREAD)
    rates = [1 / (1 + math.exp(math.log(1 / rate - 1) - shift)) for rate in RATES[is_sampled]]
    left = TOKENS if rng.random() < 0.6 else rng.randint(20, TOKENS)  # some end by themselves
    params = SamplingParams(temperature=float(is_sampled))
    return SimpleNamespace(
        left=left, rates=rates, asked=K, sampling_params=params, steps=None, num_tokens=TOKENS
    )


def _batch(requests: list[Any], contexts: Any = (), num_sampled: int = 0) -> Any:
    return SimpleNamespace(
        generations=[] if contexts else requests, requests=requests, contexts=contexts,
        is_guided=False, num_sampled=num_sampled,
    )  # fmt: skip


def _auto(captured: Captured, way: str, capture: float, folder: Path) -> AutoDraftLen:
    costs, rng = StepCosts(), random.Random(9)
    for size in MEASURED:
        for kind in (False, True):
            for k in range(K + 1):  # measured within 2 %
                seconds = (seconds_of(size, k, kind) + 2e-5) * rng.gauss(1, 0.02)
                costs.set(StepShape(size, not kind), k, StepSeconds(seconds))

    class Simulation(Launches):
        tries_unknown, capture_cost = False, capture

        def size_of(self, count: int) -> int:
            return bucket_of(count)

        def ready(self, batch: Any, lengths: list[int]) -> list[int]:
            facts = bucket_of(len(batch.generations)), batch.num_sampled > 0
            return [k for k in lengths if way == "any time" or (facts[0], k, facts[1]) in captured]

    config = NGramDecodingConfig(max_draft_len=K, draft_len_schedule="auto")
    return AutoDraftLen(
        K, config, costs, Simulation(), runs_at_launch=False, rates_path=folder / "rates"
    )


def _cell(
    batch: int, is_sampled: bool, make: Callable[[Captured], Any], captured: Captured,
    args: argparse.Namespace,
) -> tuple[float, float]:  # fmt: skip
    """Returns tokens per second, and the captures of counted turns."""
    speeds, captures = [], 0
    for seed in range(args.repeat):
        its = set(captured)
        chooser = make(its)
        engine = Simulated(chooser, its, args.capture, seed)
        auto_draft_len.time = SimpleNamespace(perf_counter=lambda engine=engine: engine.now)  # type: ignore[assignment]
        engine.turn(batch, is_sampled, max(2 * batch, 8))
        engine.num_captures = 0
        speeds += [engine.turn(batch, is_sampled, max(2 * batch, 8)) for _ in range(2)]
        captures += engine.num_captures
        getattr(chooser, "close", lambda: None)()
    return sum(speeds) / len(speeds), captures / args.repeat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,4,16,32")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--capture", type=float, default=0.04)
    args = parser.parse_args()
    everything = {(b, k, s) for b in BETWEEN for k in range(K + 1) for s in (False, True)}
    names = [*(f"K={k}" for k in range(K + 1)), *WAYS]
    print(f"| batch | T | {' | '.join(names)} |\n|{'---|' * (len(names) + 2)}")
    for batch in [int(n) for n in args.batch.split(",")]:
        for is_sampled in (False, True):
            fixed = [
                _cell(batch, is_sampled, lambda _, k=k: Fixed(k), everything, args)[0]
                for k in range(K + 1)
            ]
            cells = [f"{speed:,.0f}" for speed in fixed]
            for way in WAYS:
                with tempfile.TemporaryDirectory() as folder:
                    speed, captures = _cell(
                        batch, is_sampled,
                        lambda its, way=way, at=Path(folder): _auto(its, way, args.capture, at),
                        everything if way == "before" else set(), args,
                    )  # fmt: skip
                cells.append(f"{speed / max(fixed):.3f} ({captures:.1f})")
            print(f"| {batch} | {int(is_sampled)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
