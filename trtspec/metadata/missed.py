"""`MissedRows`: what a head has still to read of rows that the target has read.

A step that drafts nothing leaves the head's work for later: it keeps the rows here. One pass writes
their keys and values when drafting resumes, or when there is no more room.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CAPACITY = 32
"""Most rows kept of a request. So in steps that draft nothing the pass over them comes once in as
many steps."""


class MissedRows(NamedTuple):
    """Rows by slot, at index `position % W`. A request's are consecutive, at most W."""

    hidden: Tensor  # [S, W, n * D], the target's states as captured
    tokens: Tensor  # [S, W] int64, the token after each row
    positions: Tensor  # [S, W] int64, -1: no row

    @staticmethod
    def allocate(
        num_slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> MissedRows:
        """Returns room for S slots without a row; `width` is n * D."""
        shape = num_slots, CAPACITY
        return MissedRows(
            hidden=torch.zeros(*shape, width, dtype=dtype, device=device),
            tokens=torch.zeros(shape, dtype=torch.int64, device=device),
            positions=torch.full(shape, -1, dtype=torch.int64, device=device),
        )
