"""The last rows of each request, which vanilla MTP computes again in the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import native


def update_window(
    hidden: Tensor,
    ids: Tensor,
    last: Tensor,
    slots: Tensor,
    window_hidden: Tensor,
    window_ids: Tensor,
) -> None:
    """Writes each request's last W rows to its slot.

    Args:
        hidden: [T, D]; ids: [T] int64.
        last: [B] int64, the newest row to write. In place of rows before row 0 it takes row 0.
        slots: [B] int64.
        window_hidden: [S, W, D]; window_ids: [S, W] int64.
    """
    kernels = native.kernels(hidden)
    if kernels is not None and hidden.dtype == window_hidden.dtype:
        kernels.update_window(hidden.contiguous(), ids, last, slots, window_hidden, window_ids)
        return
    width = window_ids.shape[1]
    kept = (last[:, None] + torch.arange(1 - width, 1, device=last.device)).clamp_min(0)
    window_hidden[slots], window_ids[slots] = hidden[kept].to(window_hidden.dtype), ids[kept]
