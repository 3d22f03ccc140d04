"""`DraftLen`: how many drafts a step proposes for the next one."""

from __future__ import annotations

from ..checks import is_int
from ..errors import ConfigError
from .request import ScheduledBatch


class DraftLen:
    """The drafts asked for at run time, 0 … K; 0 where more requests run than the config allows.

    Args:
        max_concurrency: of the decoding config; None for no limit.
    """

    def __init__(self, max_draft_len: int, max_concurrency: int | None):
        self.max_draft_len, self.max_concurrency = max_draft_len, max_concurrency
        self._runtime = max_draft_len

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
        self._runtime = value

    def of(self, batch: ScheduledBatch) -> int:
        limit = self.max_concurrency
        crowded = limit is not None and len(batch.requests) > limit
        return 0 if crowded else self._runtime
