"""No speculation: the step's template with K = 0."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SpecWorkerBase
from .protocols import DraftInputs


class PlainWorker(SpecWorkerBase):
    """Mode NONE."""

    def draft(self, inputs: DraftInputs) -> Tensor:
        batch = inputs.num_accepted_tokens.shape[0]
        return torch.empty((batch, 0), dtype=torch.int32, device=inputs.num_accepted_tokens.device)
