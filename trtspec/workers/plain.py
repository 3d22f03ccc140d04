"""No speculation: the step's template with K = 0."""

from __future__ import annotations

from torch import Tensor

from .base import SpecWorkerBase
from .protocols import DraftInputs


class PlainWorker(SpecWorkerBase):
    """Mode NONE."""

    reads_final_states = False

    def draft(self, inputs: DraftInputs) -> Tensor:
        return self.no_drafts(inputs)
