"""Copying rows of the residual stream that are kept."""

from __future__ import annotations

from torch import Tensor

from ..launch.dispatch import twin


@twin("layer.triton_copy")
def copy_rows(rows: Tensor, to: Tensor) -> None:
    """Copies rows [T, D], each contiguous, to columns of another matrix [T, D]."""
    to.copy_(rows)
