"""`AutoVerified`: how many drafts a step verifies, of all requests together, chosen while serving.

Each request proposes K drafts. A step verifies v of each on average, the likeliest of all requests
(`max_verified_drafts`, decision 028). With v it yields 1 + (the sum of the v · n largest chances)
/ n tokens for each of n requests. (A graph for more requests has room for more of their drafts.)

The chances are the drafter's, as the slots hold them. They are copied to the host every few steps,
which nothing waits for. What was accepted corrects them. The times of steps and the choice among
v = 0, 1, … K are `AutoDraftLen`'s.

The choice looks at chances of earlier steps' drafts, never at the drafts that it decides on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...config import DecodingBaseConfig
from ..request import ScheduledBatch
from ..results import LaunchedStep, Outcomes
from .auto_draft_len import TRIAL, AutoDraftLen, Launches, _Outlook
from .draft_len import DraftLen
from .running_acceptance import PRIOR
from .step_costs import StepCosts, StepShape

WEIGHT = 0.25  # of the latest chances among those before
KEEP = 0.994  # of earlier results, at each step
RESULTS = 50.0  # accepted drafts that the drafter's own chances count as at first


class ChanceReader:
    """Copies chances to the host, without waiting.

    Args:
        chances: [S+1, K] float32, of `SlotState`.
    """

    def __init__(self, chances: Tensor):
        self._chances = chances
        self._event: torch.cuda.Event | None = None
        self._host = torch.empty(chances.shape, pin_memory=chances.is_cuda)

    def begin(self) -> None:
        """Copies what the steps launched so far leave in the slots."""
        self._host.copy_(self._chances, non_blocking=True)
        if self._chances.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def take(self) -> np.ndarray | None:
        """Returns a copy [S+1, K] of them; None while they are on their way."""
        if self._event is not None and not self._event.query():
            return None
        return self._host.numpy().copy()


class AutoVerified(AutoDraftLen):
    """Chooses for each step how many drafts of each request it verifies on average.

    Args:
        costs: what steps take by this number, as far as it is known.
        reader: of the slots' chances.
        runs_at_launch: as of `AutoDraftLen`.
    """

    def __init__(
        self,
        max_draft_len: int,
        config: DecodingBaseConfig,
        costs: StepCosts,
        launches: Launches,
        reader: ChanceReader,
        *,
        runs_at_launch: bool,
    ):
        super().__init__(max_draft_len, config, costs, launches, runs_at_launch=runs_at_launch)
        self._reader, self._number = reader, 0
        self._slots: list[int] | None = None  # whose chances are on their way
        self._begun = self._due = 0  # the choice when they were asked for; when they are again
        self._room = 1.0  # drafts that a step verifies, over v of each request
        # By v: the sum of the chances of a request's drafts that are verified, on average.
        self._chances = np.concatenate([[0.0], np.cumsum(PRIOR ** np.arange(1, max_draft_len + 1))])
        self._is_guess = True
        # Of drafts that were verified: what the chances said, and what was accepted.
        self._predicted = self._accepted = RESULTS

    def of(self, batch: ScheduledBatch, part: ScheduledBatch) -> int:
        self.share, most = None, DraftLen.of(self, batch, part)
        if not part.generations:
            return most
        most = min(most, self.limit)
        if 0 < most < self.max_draft_len:  # all are verified
            return most
        self._number += 1
        self.share = super().of(batch, part)
        return self.max_draft_len if self.share else 0

    def add_outcomes(
        self, outcomes: Outcomes, batch: ScheduledBatch, share: int | None = None
    ) -> None:
        self._take()
        count, asked = len(outcomes.requests), sum(outcomes.num_asked)
        if share is not None and asked:
            predicted = count * self._sum_of_chances(asked / count)
            self._predicted = KEEP * self._predicted + predicted
            self._accepted = KEEP * self._accepted + sum(outcomes.num_accepted)

    def end_step(
        self,
        launched: Sequence[LaunchedStep],
        read: Sequence[LaunchedStep],
        began: float,
        *,
        is_in_flight: bool,
    ) -> None:
        super().end_step(launched, read, began, is_in_flight=is_in_flight)
        self._take()
        if len(launched) != 1 or self._slots is not None or self._number < self._due:
            return
        (step,) = launched
        if step.share is None or step.batch.is_guided or not step.draft_len:
            return  # with grammars the step is not launched to its end
        # Requests that ended have no slot.
        slots = [request.slot for request in step.batch.generations if request.slot >= 0]
        if slots:
            self._slots, self._begun = slots, self._number
            self._due = self._number + TRIAL
            self._reader.begin()

    def _take(self) -> None:
        """Takes in chances that have arrived, once the step that verifies their drafts is chosen:
        no choice looks at its own."""
        if self._slots is None or self._number == self._begun:
            return
        chances = self._reader.take()
        if chances is None:
            return
        rows, self._slots = chances[self._slots], None
        best = np.sort(rows, axis=None)[::-1]
        sums = best.cumsum()[len(rows) - 1 :: len(rows)] / len(rows)  # of n, 2n, … drafts
        weight = WEIGHT
        if self._is_guess:
            weight, self._is_guess = 1.0, False
            self._predicted = self._accepted = RESULTS
        self._chances[1:] += weight * (sums - self._chances[1:])

    def _sum_of_chances(self, mean: float) -> float:
        """Returns the sum of the chances of a request's drafts, of which `mean` are verified."""
        return float(np.interp(mean, np.arange(len(self._chances)), self._chances))

    def _outlook_of(self, shape: StepShape, batch: ScheduledBatch, is_due: bool) -> _Outlook:
        # A graph's room for drafts is by its size, so fewer requests verify more of them.
        self._room = shape.size / len(batch.generations)
        return super()._outlook_of(shape, batch, is_due)

    def _length_of(self, step: LaunchedStep) -> int | None:
        return step.share

    def _expected_tokens(self) -> Sequence[float]:
        factor = self._accepted / self._predicted
        means = [min(mean * self._room, self.max_draft_len) for mean in range(len(self._chances))]
        return [1 + min(mean, factor * self._sum_of_chances(mean)) for mean in means]
