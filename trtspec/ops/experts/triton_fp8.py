"""The grouped product of `triton.py` over FP8 weights.

Weights are the left operand here, and so stay in registers on the way from codes to tensor cores.
Many rows go through it too. To make all experts' weights float for torch's `grouped_mm` takes five
times the bytes of the codes, which is as long as the product itself at some 300 rows an expert. It
also takes memory that a step does not have.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from ..layer.fp8 import Fp8Weight
from ..layer.triton_fp8 import as_read, codes_to, is_quick
from .triton import TileShape, find_tile, store_turned


class Tiles(NamedTuple):
    """The tile of a product that one program computes, and how."""

    ROWS: int
    COLUMNS: int
    DEPTH: int  # divides a group
    COUNT: int  # at least the experts, a power of two
    BY_ROWS: bool
    QUICK: bool
    PRECISION: str


def grouped_matmul(
    x: Tensor, weight: Fp8Weight, ends: Tensor, average: float, bias: Tensor | None = None
) -> Tensor:
    """As `torch.py`'s.

    Args:
        weight: of all experts: codes [E, M, K], scales [E, M, groups].
    """
    pairs, size = x.shape
    count, columns, _ = weight.codes.shape
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    shape = _tile(average, x.dtype)
    depth = shape.depth if weight.by_rows else min(shape.depth, weight.group & -weight.group)
    quick = is_quick(weight.codes, x.dtype)
    tiles = min(triton.cdiv(pairs, shape.rows) + count, pairs)
    _scaled_matmul_kernel[(tiles, triton.cdiv(columns, shape.columns))](
        x,
        as_read(weight.codes, quick),
        weight.scales.contiguous(),
        bias,
        ends,
        out,
        columns,
        size,
        count,
        weight.scales.shape[-1],
        weight.group,
        tiles=Tiles(
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            DEPTH=depth,
            COUNT=triton.next_power_of_2(count),
            BY_ROWS=weight.by_rows,
            QUICK=quick,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ),
        num_stages=shape.stages,
        num_warps=shape.warps,
        **dependent_launch(x),
    )
    return out


def _tile(rows_per_expert: float, dtype: torch.dtype) -> TileShape:
    """As `triton.py`'s."""
    if dtype == torch.float32:
        return TileShape(16 if rows_per_expert < 12 else 64, 64, 32)
    if rows_per_expert < 12:
        return TileShape(16, 64, 128, stages=4)
    if rows_per_expert < 32:
        return TileShape(32, 64, 128, stages=4)
    if rows_per_expert < 96:
        return TileShape(64, 128, 64, stages=4, warps=8)
    return TileShape(128, 128, 64, stages=4, warps=8)


@triton.jit
def _scaled_matmul_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    ends_ptr,
    out_ptr,
    columns,
    size,
    count,
    groups,
    group,
    tiles: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one expert's rows."""
    ROWS: tl.constexpr = tiles.ROWS
    COLUMNS: tl.constexpr = tiles.COLUMNS
    after_previous(PDL)
    expert, begin, end = find_tile(ends_ptr, count, ROWS, tiles.COUNT)
    if expert >= count:
        return
    row = begin + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = expert.to(tl.int64) * columns + column
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * size
    codes_ptrs = codes_ptr + weight_row[:, None] * size
    scales_ptrs = scales_ptr + weight_row * groups
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    scale = tl.load(scales_ptrs, mask=column < columns, other=0.0)
    for start in range(0, size, tiles.DEPTH):
        d = start + tl.arange(0, tiles.DEPTH)
        inside = (column[:, None] < columns) & (d[None, :] < size)
        codes = tl.load(codes_ptrs + d[None, :], mask=inside, other=0.0)
        x_inside = (row[None, :] < end) & (d[:, None] < size)
        x = tl.load(x_ptrs + d[:, None], mask=x_inside, other=0.0)
        weight = codes_to(codes, dtype, tiles.QUICK)
        if tiles.BY_ROWS:
            total = tl.dot(weight, x, total, input_precision=tiles.PRECISION)
        else:  # the next scales are asked for before this step's product needs its own
            later = (start + tiles.DEPTH) // group
            has_later = (column < columns) & (later < groups)
            next_scale = tl.load(scales_ptrs + later, mask=has_later, other=0.0)
            total += tl.dot(weight, x, input_precision=tiles.PRECISION) * scale[:, None]
            scale = next_scale
    if tiles.BY_ROWS:
        total *= scale[:, None]
    store_turned(total, bias_ptr, out_ptr, expert, (row, end), (column, columns))
