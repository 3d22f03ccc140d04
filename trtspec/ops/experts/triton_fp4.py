"""The grouped product of `triton.py` over MXFP4 weights, which are the left operand as in
`triton_fp8.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from ..layer.triton_fp8 import is_quick
from .fp4 import BLOCK, Fp4Weight
from .triton import TileShape, find_tile, store_turned

_STEP = tl.constexpr(2 * BLOCK)  # columns of four scales
_HALF = tl.constexpr(BLOCK // 2)
BITS = tl.constexpr(0x81C081C0)  # of two bf16 as csrc/include/trtspec/fp4.cuh has them
LAST_BITS, MOVE = tl.constexpr(0x001B001B), tl.constexpr(0x1084)
SCALE = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")


class Tiles(NamedTuple):
    """The tile of a product that one program computes, and how."""

    ROWS: int
    COLUMNS: int
    COUNT: int  # at least the experts, a power of two
    QUICK: bool
    PRECISION: str


def grouped_matmul(
    x: Tensor, weight: Fp4Weight, ends: Tensor, average: float, bias: Tensor | None = None
) -> Tensor:
    """As `torch.py`'s."""
    pairs = x.shape[0]
    count, columns, size = weight.shape
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    shape, quick = _tile(average, x.dtype), is_quick(weight.codes, x.dtype)
    tiles = min(triton.cdiv(pairs, shape.rows) + count, pairs)
    _fp4_matmul_kernel[(tiles, triton.cdiv(columns, shape.columns))](
        x,
        weight.codes.view(torch.int32),
        weight.scales.view(torch.int32),
        bias,
        ends,
        out,
        columns,
        size,
        count,
        weight.scales.shape[2],
        tiles=Tiles(
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            COUNT=triton.next_power_of_2(count),
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
        return TileShape(16 if rows_per_expert < 12 else 64, 64, 128)
    if rows_per_expert < 48:
        return TileShape(32, 64, 128, stages=3)
    return TileShape(128, 128, 128, stages=2, warps=8)


@triton.jit
def _fp4_matmul_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    ends_ptr,
    out_ptr,
    columns,
    size,
    count,
    scale_words,
    tiles: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one expert's rows. A step has 128 columns: two blocks of two halves."""
    ROWS: tl.constexpr = tiles.ROWS
    COLUMNS: tl.constexpr = tiles.COLUMNS
    after_previous(PDL)
    expert, begin, end = find_tile(ends_ptr, count, ROWS, tiles.COUNT)
    if expert >= count:
        return
    row = begin + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * size
    # Words of 8 codes: of 8 rows a block's 64 columns lie together, 8 words a row.
    group = (expert.to(tl.int64) * columns + column) // 8
    codes_ptrs = codes_ptr + group * size
    scales_ptrs = scales_ptr + group * (scale_words * 8) + column % 8
    is_column, is_row = column < columns, row < end
    half, word = tl.arange(0, _HALF), tl.arange(0, 8)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    scales = tl.load(scales_ptrs, mask=is_column, other=0)
    for start in range(0, size, _STEP):
        # The next scales are asked for before this step's product needs its own.
        has_later = is_column & (start + _STEP < size)
        later = tl.load(scales_ptrs + (start // _STEP + 1) * 8, mask=has_later, other=0)
        for block in tl.static_range(2):
            d = start + block * 2 * _HALF + half
            x_inside = is_row[None, :] & (d[:, None] < size)
            low_x = tl.load(x_ptrs + d[:, None], mask=x_inside, other=0.0)
            high_x = tl.load(x_ptrs + d[:, None] + _HALF, mask=x_inside, other=0.0)
            begin_word = start + block * 2 * _HALF + column % 8 * 8
            inside = is_column & (start + block * 2 * _HALF < size)
            codes = tl.load(
                codes_ptrs[:, None] + (begin_word[:, None] + word[None, :]),
                mask=inside[:, None],
                other=0,
            )
            low, high = numbers(codes, scales >> (16 * block), dtype, tiles.QUICK)
            total = tl.dot(low, low_x, total, input_precision=tiles.PRECISION)
            total = tl.dot(high, high_x, total, input_precision=tiles.PRECISION)
        scales = later
    store_turned(total, bias_ptr, out_ptr, expert, (row, end), (column, columns))


@triton.jit
def numbers(codes, scales, dtype: tl.constexpr, QUICK: tl.constexpr):
    """The numbers in a block's first and its second half, [C, 32] each, times the first two of
    `scales` [C] int32.

    Args:
        codes: [C, 8] int32, words of a block.
    """
    codes = codes.to(tl.uint32, bitcast=True)
    second = ((codes >> 3) | (codes << 29)) & BITS
    third = ((codes >> 6) | (codes << 26)) & BITS
    fourth = ((codes & LAST_BITS) * MOVE) & BITS
    low = scaled(codes & BITS, second, scales & 255, dtype, QUICK)
    return low, scaled(third, fourth, scales >> 8 & 255, dtype, QUICK)


@triton.jit
def scaled(first, second, scale, dtype: tl.constexpr, QUICK: tl.constexpr):
    """What pairs of bf16 [C, 8] are, each word's first and second one side by side, times 2^126 and
    the power of two of e8m0 codes `scale` [C]: [C, 32]."""
    COUNT: tl.constexpr = first.shape[0]
    pairs = tl.reshape(tl.join(first, second), [COUNT, 16])
    if QUICK:
        # 2^(s - 1) twice. (Of s = 0 and 1, too: no weight is so small.)
        power = ((scale << 7) + 0x3F00) * 0x10001
        pairs = tl.inline_asm_elementwise(
            SCALE,
            "=r,r,r",
            [pairs, power[:, None]],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    bits = tl.reshape(tl.join(pairs & 0xFFFF, pairs >> 16), [COUNT, 32])
    if QUICK:
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    numbers = (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (numbers * (scale << 23).to(tl.float32, bitcast=True)[:, None]).to(dtype)
