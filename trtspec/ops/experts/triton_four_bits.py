"""The grouped product of `triton.py` over INT4 and NVFP4 weights, for many rows an expert; weights
are the left operand as in `triton_fp8.py`.

In bf16 integers are rounded once they have their scales, as `four_bits.widen` rounds them.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from ..layer.four_bits import CODES, STEP, FourBitWeight
from ..layer.triton_fp8 import is_quick
from .triton import TileShape, find_tile, store_turned
from .triton_fp4 import BITS, LAST_BITS, MOVE, SCALE

_STEP, _QUARTER = tl.constexpr(STEP), tl.constexpr(STEP // 4)
_CODE_WORDS = tl.constexpr(CODES // 4)  # of a record
_LESS_ZERO_SCALED = tl.constexpr(
    "{.reg .b32 n, low; sub.rn.bf16x2 n, $1, $2; mul.rn.bf16x2 low, n, $4;"
    " fma.rn.bf16x2 $0, n, $3, low;}"
)  # a scale is two bf16


class Tiles(NamedTuple):
    """The tile of a product that one program computes, and how."""

    ROWS: int
    COLUMNS: int
    COUNT: int  # at least the experts, a power of two
    ENTRIES: int  # words of scales that a row has in a record
    FLOATS: bool
    QUICK: bool
    PRECISION: str


def grouped_matmul(
    x: Tensor, weight: FourBitWeight, ends: Tensor, average: float, bias: Tensor | None = None
) -> Tensor:
    """As `torch.py`'s."""
    pairs = x.shape[0]
    count, columns, size = weight.shape
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    shape = _tile(average, x.dtype)
    tiles = min(triton.cdiv(pairs, shape.rows) + count, pairs)
    _four_bit_matmul_kernel[(tiles, triton.cdiv(columns, shape.columns))](
        x,
        weight.records.view(torch.int32),
        weight.row_scales,
        bias,
        ends,
        out,
        columns,
        size,
        count,
        tiles=Tiles(
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            COUNT=triton.next_power_of_2(count),
            ENTRIES=weight.scale_bytes // 4,
            FLOATS=weight.row_scales is not None,
            QUICK=is_quick(weight.records, x.dtype),
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
    if rows_per_expert < 16:
        return TileShape(32, 64, 128)
    if rows_per_expert < 56:
        return TileShape(64, 128, 128, warps=8)
    return TileShape(128, 128, 128, stages=2, warps=8)


@triton.jit
def _four_bit_matmul_kernel(
    x_ptr,
    records_ptr,
    row_scales_ptr,
    bias_ptr,
    ends_ptr,
    out_ptr,
    columns,
    size,
    count,
    tiles: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one expert's rows. A step has 128 columns, in four quarters."""
    ROWS: tl.constexpr = tiles.ROWS
    COLUMNS: tl.constexpr = tiles.COLUMNS
    ENTRIES: tl.constexpr = tiles.ENTRIES
    RECORD: tl.constexpr = _CODE_WORDS + 8 * ENTRIES
    after_previous(PDL)
    expert, begin, end = find_tile(ends_ptr, count, ROWS, tiles.COUNT)
    if expert >= count:
        return
    row = begin + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * size
    is_column, is_row = column < columns, row < end
    record_ptrs = records_ptr + (expert.to(tl.int64) * columns + column) // 8 * (
        size // _STEP * RECORD
    )
    codes_ptrs = (record_ptrs + column % 8 * 16)[:, None] + tl.arange(0, 16)[None, :]
    scales_ptrs = record_ptrs + _CODE_WORDS + column % 8 * ENTRIES
    quarter = tl.arange(0, _QUARTER)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, size, _STEP):
        at = start // _STEP * RECORD
        codes = tl.load(codes_ptrs + at, mask=is_column[:, None], other=0)
        # Of a row's four pieces of four words each, word i has the columns of quarter i.
        even, odd = tl.split(tl.reshape(codes.to(tl.uint32, bitcast=True), [COLUMNS, 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        words = (first, second, third, fourth)
        for i in tl.static_range(4):
            scales = tl.load(scales_ptrs + at + i * ENTRIES // 4, mask=is_column, other=0)
            d = start + i * _QUARTER + quarter
            x = tl.load(x_ptrs + d[:, None], mask=is_row[None, :], other=0.0)
            if tiles.FLOATS:
                scales = scales >> (16 * (i % 2))
                numbers = floats_of(words[i], scales, dtype, tiles.QUICK)
            else:
                numbers = integers_of(words[i], scales, dtype, tiles.QUICK)
            total = tl.dot(numbers, x, total, input_precision=tiles.PRECISION)
    if tiles.FLOATS:
        of_rows = tl.load(row_scales_ptr + expert * columns + column, mask=is_column, other=0.0)
        total *= of_rows[:, None]
    store_turned(total, bias_ptr, out_ptr, expert, (row, end), (column, columns))


@triton.jit
def floats_of(words, scales, dtype: tl.constexpr, QUICK: tl.constexpr):
    """A quarter's numbers of e2m1 [C, 32] times 2^-8 and their scales.

    Args:
        words: [C, 4] uint32. scales: [C] int32, of whose four bytes the first is for 16 columns
            and the second for the others.
    """
    COUNT: tl.constexpr = words.shape[0]
    pairs = _in_order(
        words & BITS,
        (words >> 3 | words << 29) & BITS,
        (words >> 6 | words << 26) & BITS,
        (words & LAST_BITS) * MOVE & BITS,
    )
    pairs = tl.reshape(pairs, [COUNT, 2, 8])
    codes = tl.join(scales & 255, scales >> 8 & 255)  # [C, 2]
    if QUICK:
        powers = (codes * 16 + 0x7580) * 0x10001
        pairs = tl.inline_asm_elementwise(
            SCALE, "=r,r,r", [pairs, powers[:, :, None]], dtype=tl.uint32, is_pure=True, pack=1
        )
        return _numbers(tl.reshape(pairs, [COUNT, 16]), dtype)
    bits = tl.reshape(tl.join(pairs & 0xFFFF, pairs >> 16), [COUNT, 2, 16])
    numbers = (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    powers = (codes * 16 + 0x3680 << 16).to(tl.float32, bitcast=True)
    return tl.reshape(numbers * powers[:, :, None], [COUNT, 32]).to(dtype)


@triton.jit
def integers_of(words, entries, dtype: tl.constexpr, QUICK: tl.constexpr):
    """A quarter's integers [C, 32] less their zeros, times their scales.

    Args:
        words: [C, 4] uint32. entries: [C] int32, a scale and a zero each.
    """
    COUNT: tl.constexpr = words.shape[0]
    if QUICK:
        pairs = _in_order(
            words & 0x780078 | 0x41804180,  # 16 more, in bf16
            (words >> 4 | words << 28) & 0x780078 | 0x41804180,
            (words >> 8 | words << 24) & 0x780078 | 0x41804180,
            (words >> 12 | words << 20) & 0x780078 | 0x41804180,
        )
        zeros = ((entries & 255) * 8 + 0x4180) * 0x10001
        high = (entries & -65536).to(tl.float32, bitcast=True)
        rest = (entries & -256).to(tl.float32, bitcast=True) - high
        upper = (entries >> 16 & 0xFFFF) * 0x10001
        lower = (rest.to(tl.int32, bitcast=True) >> 16 & 0xFFFF) * 0x10001
        pairs = tl.inline_asm_elementwise(
            _LESS_ZERO_SCALED,
            "=r,r,r,r,r",
            [pairs, zeros[:, None], upper[:, None], lower[:, None]],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
        return _numbers(pairs, dtype)
    pairs = _in_order(
        words >> 3 & 0xF000F,
        words >> 7 & 0xF000F,
        words >> 11 & 0xF000F,
        (words >> 15 | words << 17) & 0xF000F,
    )
    numbers = tl.reshape(tl.join(pairs & 0xFFFF, pairs >> 16), [COUNT, 32]).to(tl.int32)
    scales = (entries & -256).to(tl.float32, bitcast=True)
    return ((numbers - (entries & 255)[:, None]).to(tl.float32) * scales[:, None]).to(dtype)


@triton.jit
def _in_order(first, second, third, fourth):
    """Pairs of words [C, 4] side by side, each word's four one after the other: [C, 16]."""
    COUNT: tl.constexpr = first.shape[0]
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))  # [C, 4, 2, 2]
    return tl.reshape(pairs, [COUNT, 16])


@triton.jit
def _numbers(pairs, dtype: tl.constexpr):
    """Pairs of bf16 [C, 16] as numbers [C, 32]."""
    COUNT: tl.constexpr = pairs.shape[0]
    bits = tl.reshape(tl.join(pairs & 0xFFFF, pairs >> 16), [COUNT, 32])
    return bits.to(tl.uint16).to(dtype, bitcast=True)
