"""`DraftLen`: how many drafts a step proposes for the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ...checks import is_int
from ...config import DecodingBaseConfig
from ...errors import ConfigError
from ..request import Request, ScheduledBatch
from ..results import LaunchedStep, Outcomes


class DraftLen:
    """The drafts asked for at run time, 0 … K; fewer or none where many requests run.

    Args:
        config: says what is drafted with how many requests; None where nothing drafts.
    """

    is_exact = False
    """Whether a step verifies as many drafts as it proposes. Then a K needs one graph, not one with
    each other K."""

    def __init__(self, max_draft_len: int, config: DecodingBaseConfig | None):
        self.max_draft_len = max_draft_len
        self.max_concurrency = None if config is None else config.max_concurrency
        schedule = None if config is None else config.draft_len_schedule
        self._schedule = sorted(schedule.items()) if isinstance(schedule, Mapping) else None
        self._runtime, self._is_runtime_given = max_draft_len, False
        self.last = max_draft_len  # proposed by the last step of generations
        self.limit = max_draft_len  # of the step that is scheduled; read where `is_exact`
        self.share: int | None = None
        """How many drafts of each request the launch verifies that `of` was last asked of, on
        average; None: not chosen."""

    @property
    def runtime(self) -> int:
        return self._runtime

    @runtime.setter
    def runtime(self, value: int) -> None:
        if not is_int(value):
            raise ConfigError(f"runtime_draft_len={value!r}: it must be an int.")
        if not 0 <= value <= self.max_draft_len:
            raise ConfigError(
                f"runtime_draft_len={value}: it must be in 0 … max_draft_len={self.max_draft_len}."
            )
        self._runtime, self._is_runtime_given = value, True

    def take_runtime(self, other: DraftLen) -> None:
        """Takes over what was set at run time, if anything was."""
        self._runtime, self._is_runtime_given = other._runtime, other._is_runtime_given

    @contextmanager
    def held_at(self, value: int) -> Iterator[None]:
        """Drafts this many inside, 0 … K. Then it is as before: set at run time, or left open.

        Raises:
            ConfigError: not an int in 0 … K.
        """
        before = self._runtime, self._is_runtime_given
        self.runtime = value
        try:
            yield
        finally:
            self._runtime, self._is_runtime_given = before

    def bound(self, waiting: Iterable[Request] = ()) -> int:
        """Returns how many drafts the next step may verify or propose at most.

        Args:
            waiting: requests that it may start.
        """
        return self.max_draft_len

    def may_rest(self, waiting: Iterable[Request] = ()) -> bool:
        """Whether the next step may draft nothing if it finds no blocks for drafts."""
        return False

    def of(self, batch: ScheduledBatch, part: ScheduledBatch) -> int:
        """Returns how many drafts a launch proposes, of a part of a batch or of all of it."""
        num_requests = len(batch.requests)
        if self.max_concurrency is not None and num_requests > self.max_concurrency:
            return 0
        if self._schedule is None:
            return self._runtime
        scheduled = next((count for most, count in self._schedule if num_requests <= most), 0)
        return min(self._runtime, scheduled)

    def add_outcomes(
        self, outcomes: Outcomes, batch: ScheduledBatch, share: int | None = None
    ) -> None:
        """Called with what became of the drafts of a step, its batch and its plan's share."""

    def end_step(
        self,
        launched: Sequence[LaunchedStep],
        read: Sequence[LaunchedStep],
        began: float,
        *,
        is_in_flight: bool,
    ) -> None:
        """Called at the end of a call of `step`, with what it launched and read."""

    def close(self) -> None:
        """Called when the engine shuts down."""
