"""The Triton kernel of `embedding.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch


def lookup(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """As its twin."""
    vocab, size = weight.shape
    out = torch.empty((ids.shape[0], size), dtype=weight.dtype, device=weight.device)
    block = min(1024, triton.next_power_of_2(size))
    _lookup_kernel[(ids.shape[0], triton.cdiv(size, block))](
        ids,
        weight,
        out,
        vocab,
        size,
        weight.stride(0),
        SCALE=scale,
        BLOCK=block,
        **dependent_launch(weight),
    )
    return out


@triton.jit
def _lookup_kernel(
    ids_ptr,
    weight_ptr,
    out_ptr,
    vocab,
    size,
    weight_row,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK numbers of one row."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    x = tl.load(weight_ptr + token * weight_row + d, mask=d < size)
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(x.dtype)
    tl.store(out_ptr + row * size + d, x, mask=d < size)
