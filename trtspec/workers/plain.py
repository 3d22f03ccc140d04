"""Modes whose steps propose nothing: they only verify."""

from __future__ import annotations

from torch import Tensor

from .base import SpecWorkerBase
from .protocols import DraftInputs


class PlainWorker(SpecWorkerBase):
    """Mode NONE: K = 0."""

    reads_final_states = False

    def draft(self, inputs: DraftInputs) -> Tensor:
        return self.no_drafts(inputs)


class UserProvidedWorker(PlainWorker):
    """Mode USER_PROVIDED. The executor asks the `Drafter` between steps, and writes its drafts."""


class SaveHiddenStatesWorker(PlainWorker):
    """Mode SAVE_HIDDEN_STATES. The target's forward captures; `executor/saving.py` writes."""

    reads_final_states = True  # they are saved, too
