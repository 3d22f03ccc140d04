"""Warns, once, that a draft head or draft model is dead: its drafts are almost never accepted, or
far less often than at the end of its training.

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
LEAST_OF_TRAINED = 1 / 3  # of what training ended with; texts of another kind cost less
HOTTEST = 1.0  # above this temperature the target's choice is close to uniform
DOCTOR = "trtspec doctor --target MODEL_DIR --head HEAD_DIR"


def is_dead(proposed: int, accepted: int) -> bool:
    """Returns whether so few of the first drafts were accepted that the drafter is dead."""
    return proposed > 0 and accepted < DEAD_RATE * proposed


def complaint(proposed: int, accepted: int, trained: float | None) -> str | None:
    """Returns what is wrong where so few of the first drafts were accepted.

    Args:
        trained: the share of them at the end of training; None is not known.
    """
    if is_dead(proposed, accepted):
        return "the drafter looks dead"
    if trained is None or proposed == 0 or accepted >= LEAST_OF_TRAINED * trained * proposed:
        return None
    return (
        f"at the end of the head's training it was {trained:.0%}. It may be read otherwise than "
        "it was trained, or texts are of quite another kind"
    )


class DeadDrafterWatch:
    """Counts `window` first drafts or more, judges them, and starts again. Warns once of a dead
    drafter, and once of one that is worse than in training for two windows in a row.

    Args:
        trained: as of `complaint`.
    """

    def __init__(self, window: int = WINDOW, trained: float | None = None):
        self.window, self.trained = window, trained
        self.is_dead = False
        self._has_warned = False  # of one that is worse than in training
        self._was_worse = False  # in the window before
        self._proposed = self._accepted = 0

    @classmethod
    def for_mode(
        cls, mode: SpeculativeDecodingMode, trained: float | None = None
    ) -> DeadDrafterWatch | None:
        return cls(trained=trained) if mode.drafts_with_network() else None

    def see(self, accepted: Sequence[bool]) -> None:
        """Counts first drafts that a step verified, of requests no hotter than `HOTTEST` and
        without a `logit_bias`."""
        if self.is_dead:
            return
        self._proposed += len(accepted)
        self._accepted += sum(accepted)
        if self._proposed < self.window:
            return
        wrong = complaint(self._proposed, self._accepted, self.trained)
        self.is_dead = is_dead(self._proposed, self._accepted)
        is_told = self.is_dead or (self._was_worse and not self._has_warned)
        self._was_worse = wrong is not None
        if wrong is not None and is_told:
            self._has_warned = True
            share = 100 * self._accepted / self._proposed
            logger.warning(
                "Of the last %d first drafts %d were accepted (%.1f %%): %s. The text is the "
                "target's all the same, but drafting costs time. To find out why: %s",
                self._proposed, self._accepted, share, wrong, DOCTOR,
            )  # fmt: skip
        self._proposed = self._accepted = 0
