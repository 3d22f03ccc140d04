"""`AutoDraftLen`: the draft length with the most tokens per second, found while serving.

With K drafts a request's step yields 1 + c1 + c1·c2 + … tokens, where ci is the share of drafts i
accepted among those whose predecessors were. A step takes t(n, K) seconds for n requests, the
device's or the host's, whichever is slower. All are measured on the steps themselves. So a length
is tried for a few steps where its time is unknown. Its neighbours are tried now and then, ever more
rarely while nothing changes.

The choice looks at finished steps alone, never at the drafts that it decides on. So it changes no
distribution of tokens. Seeded tokens may change where they depend on K.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...config import DecodingBaseConfig
from ..request import Request, ScheduledBatch
from ..results import LaunchedStep, Outcomes
from .draft_len import DraftLen
from .running_acceptance import AcceptanceByKind
from .step_costs import StepCosts, StepShape

TRIAL, REST = 8, 16  # steps for which a length is tried, and kept before the next decision
TRIALS = 8  # of a length whose time is unknown; another number of requests may cut one off
FIRST_PROBE, LAST_PROBE = 512, 8192  # steps between trials of neighbours
SHORTEST_REST = 64  # steps between two trials at K = 0
PROBE_SHARE = 1 / 200  # of the time at K = 0 that the first trials may cost
NEAR = 0.9  # of the chosen length's speed: slower ones are tried no more
BETTER = 1.02  # a longer one must be that much faster to be taken
SWITCH = 1.05  # and any one when the number of requests changes
SAVE_EVERY = 60.0  # seconds, at most
START = 3
RULES_OF_K = ("rejection", "block")  # seeded tokens are the same while K is
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)


@dataclass
class _Probe:
    """When neighbours are tried next with one shape."""

    at: int
    every: int = FIRST_PROBE


class _Outlook(NamedTuple):
    """What is known of the lengths for one `StepShape`. It holds for some steps."""

    until: int  # a step
    most: int  # drafts within the limits of the step
    allowed: tuple[int, ...]  # lengths to choose from
    speeds: dict[int, float]  # of these
    loss: float  # seconds of each step, for want of a faster length's graph
    sought: int | None  # one without a graph, which has earned it


class Launches:
    """What launching a length needs: nothing here, a graph where there are some."""

    tries_unknown = True
    """Lengths of unknown times are tried at once.

    Where each needs a graph, that would make requests wait. There they are tried with the
    neighbours, more rarely.
    """

    def size_of(self, count: int) -> int:
        """Rounds a number of requests up to the size that a step is run with."""
        return 1 << (count - 1).bit_length()

    def is_lost(self, shape: StepShape, draft_len: int) -> bool:
        """Whether a length cannot be used with a shape: its graph found no memory."""
        return False

    def ready(self, batch: ScheduledBatch, lengths: list[int]) -> list[int]:
        """Returns those lengths that can be launched at once. For another one a graph is captured
        first, while requests wait."""
        return lengths

    @property
    def capture_cost(self) -> float:
        """The seconds that a capture takes."""
        return 0.0


class AutoDraftLen(DraftLen):
    """Chooses K for each step, for the whole batch.

    Args:
        costs: what steps take, as far as it is known.
        runs_at_launch: the host computes a step when it launches it, as on the CPU.
        rates_path: the file that keeps acceptance for the next engine; None keeps nothing.
        is_default: K was left open. The choice gives way to `runtime`, where that is set, and
            does not act in steps whose results would show K: those with a request whose seeded
            tokens would change with K, or whose steps are recorded.
    """

    is_exact = True

    def __init__(
        self,
        max_draft_len: int,
        config: DecodingBaseConfig,
        costs: StepCosts,
        launches: Launches,
        *,
        runs_at_launch: bool,
        rates_path: Path | None = None,
        is_default: bool = False,
    ):
        super().__init__(max_draft_len, config)
        self.costs, self.launches = costs, launches
        self._runs_at_launch, self._is_default = runs_at_launch, is_default
        self._seeds_matter = config.acceptance in RULES_OF_K
        self._acceptance, self._saved = AcceptanceByKind(max_draft_len, rates_path), 0.0
        # The choice, and the step that it was made for.
        self.lengths = (*(k for k in LENGTHS if k < max_draft_len), max_draft_len)
        self.chosen = min(START, max_draft_len)
        self._shape: StepShape | None = None
        self._most = max_draft_len  # within the step's limits
        self._allowed = self.lengths  # within them, and with a graph or worth one
        # Of its requests, when they were last looked at: the share that is sampled, and the mean
        # tokens of context.
        self._share_sampled = self._context = 0.0
        self._gives_way = False  # to `runtime`: the choice does not act
        self._outlooks: dict[StepShape, _Outlook] = {}
        self._shapes: dict[tuple[int, bool, bool], StepShape] = {}
        # Counts of steps: now; at the next decision; at the last fold of acceptance, or new shape.
        self._steps = self._until = self._folded = self._changed = 0
        # What steps lose for want of a faster length's graph, until that pays for its capture.
        self._loss, self._since = 0.0, 0  # seconds of each step since then
        self._owed: dict[StepShape, float] = {}
        # Trials of other lengths.
        self.num_trials = 0
        self._trials: deque[int] = deque()  # still to come
        self._tried: Counter[tuple[StepShape, int]] = Counter()
        self._before_trials: int | None = None  # what was chosen before the trials that run
        self._is_probe = False  # whether these trials are of lengths whose times are known
        self._probes: dict[StepShape, _Probe] = {}
        # The last step that was timed, and when it ended.
        self._timed: tuple[StepShape, int] | None = None
        self._ended = 0.0

    def of(self, batch: ScheduledBatch, part: ScheduledBatch) -> int:
        most = super().of(batch, part)
        self._gives_way = self._is_default and (self._is_runtime_given or self._would_tell(batch))
        if self._gives_way and part.generations:
            return min(most, self.limit)
        if not part.generations:
            # Prompts draft as many as any step may verify, so that one graph serves them.
            return most
        return min(self._choose(part, most), self.limit)

    def bound(self, waiting: Iterable[Request] = ()) -> int:
        """Returns 0 while drafting rests and the next step decides nothing, else K."""
        decides = self._steps + 1 >= self._until
        if self.chosen or decides or not self.may_rest(waiting):
            return self.max_draft_len
        return 0

    def may_rest(self, waiting: Iterable[Request] = ()) -> bool:
        if self._is_default:
            soon = ScheduledBatch([], list(waiting))  # as if they decoded already
            self._gives_way |= self._would_tell(soon)
        return not self._gives_way

    def _would_tell(self, batch: ScheduledBatch) -> bool:
        """Whether the outcome of one of these requests shows how many drafts its steps had."""
        return batch.records_steps or (self._seeds_matter and batch.has_seeds)

    def close(self) -> None:
        self._save()

    def _save(self) -> None:
        self._saved = time.perf_counter()
        self.costs.save()
        self._acceptance.save()

    def shape_of(self, batch: ScheduledBatch) -> StepShape:
        """Returns what a step of these generations is timed as."""
        facts = len(batch.generations), not batch.num_sampled, batch.is_guided
        if facts not in self._shapes:
            self._shapes[facts] = StepShape(self.launches.size_of(facts[0]), *facts[1:])
        return self._shapes[facts]

    @property
    def rates(self) -> dict[bool, list[float]]:
        """Shares of drafts accepted by position, as estimated: of greedy requests (True), of
        sampled ones."""
        return {kind: acceptance.rates for kind, acceptance in self._acceptance.kinds.items()}

    # -- what steps bring ----------------------------------------------------------------------
    def add_outcomes(
        self, outcomes: Outcomes, batch: ScheduledBatch, share: int | None = None
    ) -> None:
        self._acceptance.add(outcomes, batch)

    def end_step(
        self,
        launched: Sequence[LaunchedStep],
        read: Sequence[LaunchedStep],
        began: float,
        *,
        is_in_flight: bool,
    ) -> None:
        """Notes what a step of generations alone took, unless it gives way.

        Args:
            launched, read: by this call of the host.
            began: when the call began, by `time.perf_counter`.
            is_in_flight: whether a step ran on the device then, so that it began earlier.
        """
        now, before = time.perf_counter(), self._timed
        seconds = now - (self._ended if is_in_flight and not self._runs_at_launch else began)
        self._ended, self._timed = now, None
        steps = launched if self._runs_at_launch else read
        if len(steps) != 1 or steps[0].batch.contexts or not steps[0].batch.generations:
            return
        draft_len = self._length_of(steps[0])
        if draft_len is None:
            return
        shape = self.shape_of(steps[0].batch)
        self._timed = shape, draft_len
        if self._gives_way:  # the context of its requests is not looked at
            return
        if self._timed == before:  # the first one may verify fewer than it proposes
            # With grammars, and without a step in flight, host and device wait for each other.
            apart = is_in_flight and not (self._runs_at_launch or shape.is_guided)
            waited = steps[0].waited if apart else None
            self.costs.add(shape, draft_len, seconds, waited, self._context)

    def _length_of(self, step: LaunchedStep) -> int | None:
        """Returns which of `lengths` a step had; None: none of them."""
        return step.draft_len

    # -- the choice ----------------------------------------------------------------------------
    def _choose(self, batch: ScheduledBatch, most: int) -> int:
        shape, self._steps = self.shape_of(batch), self._steps + 1
        if self._steps - self._folded >= REST:
            self._folded = self._steps
            self._acceptance.fold()
        is_new, is_due = shape != self._shape or most != self._most, self._steps >= self._until
        if is_new or is_due or self.launches.is_lost(shape, self.chosen):
            self._settle()
            self._most = most
            outlook = self._outlook_of(shape, batch, is_due)
            self._allowed, self._loss = outlook.allowed, outlook.loss
            if is_new or self.chosen not in self._allowed:
                self._begin(shape)
            else:
                self._decide(shape)
            if self.chosen == outlook.sought:
                self._owed[shape] = 0.0
        return self.chosen

    def _outlook_of(self, shape: StepShape, batch: ScheduledBatch, is_due: bool) -> _Outlook:
        """Returns what is known of a shape: found out anew where a decision is due, or from at most
        `REST` steps ago."""
        known = self._outlooks.get(shape)
        is_fresh = known is not None and known.most == self._most and self._steps < known.until
        if known and is_fresh and not (is_due or self.launches.is_lost(shape, self.chosen)):
            return known
        count = len(batch.generations)
        self._share_sampled = batch.num_sampled / count
        self._context = sum(request.num_tokens for request in batch.generations) / count
        allowed, sought = self._lengths_for(shape, batch)
        speeds = self._speeds(shape, allowed)
        until = self._steps + REST
        self._outlooks[shape] = _Outlook(until, self._most, allowed, speeds, self._loss, sought)
        return self._outlooks[shape]

    def _settle(self) -> None:
        """Books what was lost since the last choice for want of a graph."""
        if self._shape is not None and self._loss:
            lost = self._loss * (self._steps - self._since)
            self._owed[self._shape] = self._owed.get(self._shape, 0.0) + lost
        self._loss, self._since = 0.0, self._steps

    def _lengths_for(
        self, shape: StepShape, batch: ScheduledBatch
    ) -> tuple[tuple[int, ...], int | None]:
        """Returns the lengths to choose from, and the one that has earned its graph, if any.

        A length without a graph is one of them where none has a graph, or once its graph would
        have saved what it costs.
        """
        usable = [
            k for k in self.lengths if k <= self._most and not self.launches.is_lost(shape, k)
        ]
        ready = self.launches.ready(batch, usable)
        missing = [k for k in usable if k not in ready]
        if not (ready and missing):
            return tuple(usable) or (0,), None
        fastest, sought = self._fastest(shape, ready), self._fastest(shape, missing)
        speed = self._speeds(shape, (fastest, sought))
        if speed[sought] > BETTER * speed[fastest]:
            if self._owed.get(shape, 0.0) >= self.launches.capture_cost:
                return tuple(sorted([*ready, sought])), sought
            seconds = self.costs.of(shape, [fastest], self._context)[fastest]
            self._loss = seconds * (1 - speed[fastest] / speed[sought])
        return tuple(ready), None

    def _begin(self, shape: StepShape) -> None:
        """Starts with a shape, or with other limits. Trials that were cut off are put back.

        Requests that end and begin change the shape every few steps. Each change of the length
        wastes drafts: the slots hold as many as were proposed before. So it stays where it is
        nearly the fastest. A decision that was due is the next step's.
        """
        if self._before_trials is not None and self._shape is not None:
            if self._is_probe:
                self._probe_of(self._shape).at = self._steps + REST
            self.chosen, self._before_trials = self._before_trials, None
            self._trials.clear()
        self._shape, self._changed = shape, self._steps
        self.chosen = self._best(self._outlooks[shape].speeds, SWITCH)
        self._until = max(self._until, self._steps + 1)

    def _decide(self, shape: StepShape) -> None:
        if not self._trials:
            best = self._best(self._outlooks[shape].speeds)
            if self._before_trials is not None:
                self._end_trials(shape, best)
            elif best == 0 < self.chosen:
                self._probes[shape] = self._probe_at_rest(shape)
            self.chosen = best
            to_try = self._to_try(shape)
            # A probe of what is known waits for a number of requests that lasts.
            if not self._is_probe or self._steps - self._changed >= REST:
                self._trials.extend(to_try)
            if self._trials:
                self._before_trials = best
        if self._trials:
            self.chosen = self._trials.popleft()
            self._tried[shape, self.chosen] += 1
            self.num_trials += 1
        self._until = self._steps + (REST if self._before_trials is None else TRIAL)

    def _to_try(self, shape: StepShape) -> list[int]:
        """Returns lengths to try next: unknown ones that matter, or neighbours if it is time."""
        near, known = self._neighbours(shape), self.costs.is_known
        unknown = [
            k
            for k in near
            if self._tried[shape, k] < TRIALS and not self.costs.is_settled(shape, k)
        ]
        self._is_probe = not (unknown and self.launches.tries_unknown)
        if not self._is_probe:
            return unknown
        probe = self._probe_of(shape)
        if self._steps < probe.at:
            return []
        if self.chosen == 0:
            return near
        speed = self._speeds(shape, (*near, self.chosen))
        least = NEAR * speed[self.chosen]
        near = [k for k in near if speed[k] > least or not known(shape, k)]
        if not near:
            probe.at = self._steps + probe.every
        return near

    def _probe_at_rest(self, shape: StepShape) -> _Probe:
        """Returns when drafting is tried again after it has stopped: the sooner, the less that
        costs."""
        drafting = self._allowed[1:]
        if not drafting:
            return _Probe(self._steps + FIRST_PROBE)
        one = self._fastest(shape, drafting)
        speed = self._speeds(shape, (0, one))
        every = round(TRIAL * (1 - speed[one] / speed[0]) / PROBE_SHARE)
        every = min(FIRST_PROBE, max(SHORTEST_REST, every))
        return _Probe(self._steps + every, every)

    def _end_trials(self, shape: StepShape, best: int) -> None:
        """Waits longer before the next probe if this one changed nothing."""
        if time.perf_counter() - self._saved > SAVE_EVERY:
            self._save()
        if self._is_probe:
            probe, is_same = self._probe_of(shape), best == self._before_trials
            probe.every = min(LAST_PROBE, 2 * probe.every) if is_same else FIRST_PROBE
            probe.at = self._steps + probe.every
        self._before_trials = None

    def _probe_of(self, shape: StepShape) -> _Probe:
        return self._probes.setdefault(shape, _Probe(self._steps + FIRST_PROBE))

    def _neighbours(self, shape: StepShape) -> list[int]:
        """Returns the lengths beside the chosen one, and 0. Beside 0: the best that drafts."""
        place = self._allowed.index(self.chosen)
        if place == 0:
            drafting = self._allowed[1:]
            return [self._fastest(shape, drafting)] if drafting else []
        beside = {self._allowed[0], *self._allowed[place - 1 : place + 2]} - {self.chosen}
        return sorted(beside)

    def _best(self, speed: dict[int, float], least: float = 1.0) -> int:
        """Returns the fastest length. What was chosen before the trials stays at a tie.

        Args:
            speed: of all allowed lengths.
            least: times its speed that another one must have.
        """
        kept = self.chosen if self._before_trials is None else self._before_trials
        kept = max((k for k in self._allowed if k <= kept), default=self._allowed[0])
        fastest = max(self._allowed, key=lambda k: (speed[k], -k))
        needed = max(least, BETTER if fastest > kept else 1.0)
        return fastest if speed[fastest] > needed * speed[kept] else kept

    def _fastest(self, shape: StepShape, lengths: Sequence[int]) -> int:
        speed = self._speeds(shape, lengths)
        return max(lengths, key=lambda k: (speed[k], -k))

    def _speeds(self, shape: StepShape, lengths: Sequence[int]) -> dict[int, float]:
        """Returns tokens per second and request."""
        tokens = self._expected_tokens()
        seconds = self.costs.of(shape, lengths, self._context)
        return {k: tokens[k] / seconds[k] for k in lengths}

    def _expected_tokens(self) -> Sequence[float]:
        """Returns the tokens of a request's step for lengths 0, 1, …"""
        return self._acceptance.expected_tokens(self._share_sampled)
