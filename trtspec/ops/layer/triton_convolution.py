"""The Triton kernel of `convolution.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch


def convolve_blocks(
    x: Tensor, base: Tensor, dynamic: Tensor, block: int, residual: Tensor | None = None
) -> Tensor:
    """As its twin; x, base and residual have contiguous rows."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    width = min(1024, triton.next_power_of_2(size))
    _convolve_kernel[(rows, triton.cdiv(size, width))](
        x,
        base,
        dynamic,
        residual,
        out,
        x.stride(0),
        dynamic.stride(0),
        dynamic.stride(1),
        0 if residual is None else residual.stride(0),
        size,
        size // dynamic.shape[2],
        block,
        TAPS=base.shape[0],
        WIDTH=width,
        num_warps=4,
        **dependent_launch(x),
    )
    return out


@triton.jit
def _convolve_kernel(
    x_ptr,
    base_ptr,
    dynamic_ptr,
    residual_ptr,
    out_ptr,
    x_row,
    dynamic_row,
    dynamic_tap,
    residual_row,
    size,
    group,
    block,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """WIDTH channels of one row."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = row % block
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = c < size
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        seen = inside & (place >= tap)
        x = tl.load(x_ptr + (row - tap) * x_row + c, mask=seen, other=0.0).to(tl.float32)
        base = tl.load(base_ptr + tap * size + c, mask=inside, other=0.0).to(tl.float32)
        at = row * dynamic_row + tap * dynamic_tap + c // group
        total += x * (base + tl.load(dynamic_ptr + at, mask=inside, other=0.0).to(tl.float32))
    if residual_ptr is not None:
        added = tl.load(residual_ptr + row * residual_row + c, mask=inside, other=0.0)
        total += added.to(tl.float32)
    tl.store(out_ptr + row * size + c, total.to(out_ptr.dtype.element_ty), mask=inside)
