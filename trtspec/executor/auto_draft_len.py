"""`AutoDraftLen`: the draft length with the most tokens per second, found while serving.

With K drafts a request's step yields 1 + c1 + c1·c2 + … tokens, where ci is the share of drafts i
accepted among those whose predecessors were. A step takes t(n, K) seconds for n requests. Both are
measured on the steps themselves. So a length is tried for a few steps where its time is unknown.
Its neighbours are tried now and then, ever more rarely while nothing changes.

The choice looks at finished steps alone, never at the drafts that it decides on. So it changes no
distribution of tokens.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from ..config import DecodingBaseConfig
from .draft_len import DraftLen
from .request import ScheduledBatch
from .step_costs import StepCosts, StepShape

TRIAL, REST = 8, 16  # steps for which a length is tried, and kept before the next decision
SETTLE = 3  # steps after a change whose time does not count: two may be in flight
FIRST_PROBE, LAST_PROBE = 512, 8192  # steps between trials of neighbours
BETTER = 1.02  # a longer one must be that much faster to be taken
KEEP, MEMORY = 0.9, 400  # of earlier acceptance at each decision; in steps of requests at most
PRIOR, PRIOR_STEPS = 0.6, 4.0  # acceptance of the first draft before anything is seen
START = 3
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 32, 48, 64)


class RunningAcceptance:
    """Shares of accepted drafts by position, where all before were accepted. It forgets slowly."""

    def __init__(self, max_draft_len: int):
        self._seen: Counter[tuple[int, int]] = Counter()  # (asked, accepted) -> steps
        self._reached = [0.0] * max_draft_len
        self._accepted = [0.0] * max_draft_len

    def add(self, num_asked: int, num_accepted: int) -> None:
        self._seen[num_asked, num_accepted] += 1

    def fold(self) -> None:
        """Takes in what was added since; earlier steps count less from now on."""
        if not any(asked for asked, _ in self._seen):  # nothing was drafted
            self._seen.clear()
            return
        kept = min(KEEP, MEMORY / max(1.0, *self._reached))
        for sums in (self._reached, self._accepted):
            sums[:] = [kept * value for value in sums]
        for (asked, accepted), steps in self._seen.items():
            for position in range(min(asked, len(self._reached))):
                if accepted >= position:
                    self._reached[position] += steps
                    self._accepted[position] += steps * (accepted > position)
        self._seen.clear()

    def expected_tokens(self) -> list[float]:
        """Returns the tokens of a request's step for K = 0, 1, …

        A position that was seldom reached is taken to be like the one before it.
        """
        tokens, product, rate = [1.0], 1.0, PRIOR
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            rate = (accepted + PRIOR_STEPS * rate) / (reached + PRIOR_STEPS)
            product *= rate
            tokens.append(tokens[-1] + product)
        return tokens


class AutoDraftLen(DraftLen):
    """Chooses K for each step, for the whole batch.

    Args:
        bucket: rounds a number of requests up to the size that a step is run with.
    """

    is_exact = True

    def __init__(
        self,
        max_draft_len: int,
        config: DecodingBaseConfig,
        costs: StepCosts,
        bucket: Callable[[int], int],
    ):
        super().__init__(max_draft_len, config)
        self.costs, self._bucket = costs, bucket
        self.lengths = (*(k for k in LENGTHS if k < max_draft_len), max_draft_len)
        self.chosen = min(START, max_draft_len)
        self._shape: StepShape | None = None
        self._acceptance = {kind: RunningAcceptance(max_draft_len) for kind in (True, False)}
        self._trials: deque[int] = deque()
        self._tried: set[tuple[StepShape, int]] = set()
        self._steps = self._until = 0
        self._probe_at, self._probe_every = FIRST_PROBE, FIRST_PROBE
        self._before_probe: int | None = None  # what was chosen before the trials that run
        self._quiet = 0  # steps since something changed
        self._ended = 0.0

    def of(self, batch: ScheduledBatch, part: ScheduledBatch) -> int:
        most = super().of(batch, part)
        if part.generations:
            return min(most, self._choose(part))
        # Prompts draft as many as any step may verify, so that one graph serves them.
        return most if self.chosen else 0

    def close(self) -> None:
        self.costs.save()

    # -- what steps bring ----------------------------------------------------------------------
    def add_result(self, num_asked: int, num_accepted: int) -> None:
        if self._shape is not None:
            self._acceptance[self._shape.all_greedy].add(num_asked, num_accepted)

    def end_step(self, batch: ScheduledBatch, began: float, *, is_in_flight: bool) -> None:
        """Notes what a step of generations alone took.

        Args:
            began: when the host's call began, by `time.perf_counter`.
            is_in_flight: whether a step ran on the device then, so that it began earlier.
        """
        now = time.perf_counter()
        seconds = now - (self._ended if is_in_flight else began)
        self._ended = now
        if batch.contexts or not batch.generations or batch.is_guided:
            self._quiet = 0
            return
        self._quiet += 1
        if self._quiet > SETTLE and self._shape is not None:
            self.costs.add(self._shape, self.chosen, seconds)

    # -- the choice ----------------------------------------------------------------------------
    def _choose(self, batch: ScheduledBatch) -> int:
        params = [request.sampling_params for request in batch.generations]
        shape = StepShape(self._bucket(len(params)), all(p.is_greedy for p in params))
        self._steps += 1
        if shape != self._shape:
            self._shape = shape
            self._trials.clear()
            self._before_probe = None
            self._set(self._best(shape))
            self._until = self._steps + REST
        elif self._steps >= self._until:
            self._decide(shape)
        return self.chosen

    def _set(self, draft_len: int) -> None:
        if draft_len != self.chosen:
            self.chosen, self._quiet = draft_len, 0

    def _decide(self, shape: StepShape) -> None:
        self._acceptance[shape.all_greedy].fold()
        if not self._trials:
            best = self._best(shape)
            self._end_probe(best)
            self._set(best)
            self._trials.extend(self._to_try(shape))
            if self._trials:
                self._before_probe = best
        if self._trials:
            self._set(self._trials.popleft())
            self._tried.add((shape, self.chosen))
            self._until = self._steps + TRIAL
        else:
            self._until = self._steps + REST

    def _to_try(self, shape: StepShape) -> list[int]:
        """Returns lengths to try next: unknown ones that matter, or neighbours if it is time."""
        near = self._neighbours(shape)
        unknown = [
            k for k in near if (shape, k) not in self._tried and not self.costs.is_known(shape, k)
        ]
        if unknown or self._steps < self._probe_at:
            return unknown
        self._probe_at = self._steps + self._probe_every
        return near

    def _neighbours(self, shape: StepShape) -> list[int]:
        """Returns the lengths beside the chosen one, and 0. Beside 0: the best that drafts."""
        place = self.lengths.index(self.chosen)
        if place == 0:
            drafting = self.lengths[1:]
            return [self._fastest(shape, drafting)] if drafting else []
        beside = {0, *self.lengths[place - 1 : place + 2]} - {self.chosen}
        return sorted(beside)

    def _end_probe(self, best: int) -> None:
        """Waits longer before the next trials if the last ones changed nothing."""
        if self._before_probe is None:
            return
        self.costs.save()
        is_same, self._before_probe = best == self._before_probe, None
        self._probe_every = min(LAST_PROBE, 2 * self._probe_every) if is_same else FIRST_PROBE
        self._probe_at = self._steps + self._probe_every

    def _best(self, shape: StepShape) -> int:
        """Returns the fastest length. What was chosen before the trials stays at a tie."""
        kept = self.chosen if self._before_probe is None else self._before_probe
        fastest = self._fastest(shape, self.lengths)
        speed = self._speeds(shape, (kept, fastest))
        needed = BETTER if fastest > kept else 1.0
        return fastest if speed[fastest] > needed * speed[kept] else kept

    def _fastest(self, shape: StepShape, lengths: Sequence[int]) -> int:
        speed = self._speeds(shape, lengths)
        return max(lengths, key=lambda k: (speed[k], -k))

    def _speeds(self, shape: StepShape, lengths: Sequence[int]) -> dict[int, float]:
        """Returns tokens per second and request."""
        tokens = self._acceptance[shape.all_greedy].expected_tokens()
        seconds = self.costs.of(shape, lengths)
        return {k: tokens[k] / seconds[k] for k in lengths}
