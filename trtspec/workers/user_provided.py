"""Drafts from host code: steps only verify, and the executor asks the `Drafter` in between."""

from __future__ import annotations

from torch import Tensor

from .base import SpecWorkerBase
from .protocols import DraftInputs


class UserProvidedWorker(SpecWorkerBase):
    """Mode USER_PROVIDED. The executor overwrites the -1 drafts before the next step."""

    reads_final_states = False

    def draft(self, inputs: DraftInputs) -> Tensor:
        return self.no_drafts(inputs)
