"""Drafts from host code: the step only verifies; the executor asks the `Drafter` in between."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import DraftInputs, SpecWorkerBase


class UserProvidedWorker(SpecWorkerBase):
    """Mode USER_PROVIDED. The executor overwrites the -1 drafts before the next step."""

    def draft(self, inputs: DraftInputs) -> Tensor:
        lens = inputs.num_accepted_tokens
        return torch.full(
            (lens.shape[0], self.max_draft_len), -1, dtype=torch.int32, device=lens.device
        )
