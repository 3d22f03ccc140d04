"""Warns, once, that a draft head or draft model is dead: its drafts are almost never accepted.

Wrong weights, layers or RoPE never show in the output, only here. The watch counts on the host what
the host reads anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..metadata.mode import SpeculativeDecodingMode

logger = logging.getLogger(__name__)

WINDOW = 256  # first drafts that are judged together
DEAD_RATE = 0.02  # a drafter that works is far above this; chance is one over the vocabulary
HOTTEST = 1.0  # above this temperature the target's choice is close to uniform
DOCTOR = "trtspec doctor --target MODEL_DIR --head HEAD_DIR"


def is_dead(proposed: int, accepted: int) -> bool:
    """Returns whether so few of the first drafts were accepted that the drafter is dead."""
    return proposed > 0 and accepted < DEAD_RATE * proposed


class DeadDrafterWatch:
    """Counts `window` first drafts or more, judges them, and starts again. Warns once."""

    def __init__(self, window: int = WINDOW):
        self.window = window
        self.has_warned = False
        self._proposed = self._accepted = 0

    @classmethod
    def for_mode(cls, mode: SpeculativeDecodingMode) -> DeadDrafterWatch | None:
        return cls() if mode.drafts_with_network() else None

    def see(self, accepted: Sequence[bool]) -> None:
        """Counts first drafts that a step verified, of requests no hotter than `HOTTEST` and
        without a `logit_bias`."""
        if self.has_warned:
            return
        self._proposed += len(accepted)
        self._accepted += sum(accepted)
        if self._proposed < self.window:
            return
        if is_dead(self._proposed, self._accepted):
            self.has_warned = True
            logger.warning(
                "Of the last %d first drafts %d were accepted (%.1f %%): the drafter looks dead. "
                "The text is the target's all the same, but drafting only costs time. To find "
                "out why: %s",
                self._proposed, self._accepted, 100 * self._accepted / self._proposed, DOCTOR,
            )  # fmt: skip
        self._proposed = self._accepted = 0
