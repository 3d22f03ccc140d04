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
from .triton import TileShape, find_tile

_STEP = tl.constexpr(2 * BLOCK)  # columns of four scales
_HALF = tl.constexpr(BLOCK // 2)


def _pair(out: str, codes: str, magnitude: int, sign: int, power: str) -> str:
    """Returns PTX that makes two bf16 of two bytes, in bits 8 to 15 and 24 to 31 of a register.

    A bf16 with e2m1's exponent and mantissa is 2^126 times too small, which is in the factor.

    Args:
        magnitude, sign: how far their bits go to the right, and to the left.
        power: the register with the factor, twice.
    """
    return f"""
        shr.b32 bits, {codes}, {magnitude};
        and.b32 bits, bits, 0x01c001c0;
        shl.b32 sign, {codes}, {sign};
        lop3.b32 bits, sign, 0x80008000, bits, 0xea;
        mul.rn.bf16x2 {out}, bits, {power};
    """


_LOW_BITS, _HIGH_BITS = (2, 4), (6, 0)
_LOW, _HIGH = (
    tl.constexpr(
        "{ .reg .b32 a, bits, sign, power; cvt.u32.u16 a, $1; prmt.b32 a, a, 0, 0x1404;"
        f"mov.b32 power, 0x7e807e80; {_pair('$0', 'a', *bits, 'power')} }}"
    )
    for bits in (_LOW_BITS, _HIGH_BITS)
)
"""Of two bytes."""
_BOTH = tl.constexpr(
    "{ .reg .b32 a, b, bits, sign; prmt.b32 a, $4, 0, 0x1404; prmt.b32 b, $4, 0, 0x3424;"
    + _pair("$0", "a", *_LOW_BITS, "$5")
    + _pair("$1", "b", *_LOW_BITS, "$6")
    + _pair("$2", "a", *_HIGH_BITS, "$7")
    + _pair("$3", "b", *_HIGH_BITS, "$8")
    + "}"
)
"""Of four bytes, times their scales."""


class Tiles(NamedTuple):
    """The tile of a product that one program computes, and how."""

    ROWS: int
    COLUMNS: int
    COUNT: int  # at least the experts, a power of two
    SCALED: bool  # scales are multiplied with weights, not with sums
    QUICK: bool
    PRECISION: str


def grouped_matmul(
    x: Tensor, weight: Fp4Weight, ends: Tensor, average: float, bias: Tensor | None = None
) -> Tensor:
    """As `torch.py`'s."""
    pairs = x.shape[0]
    count, columns, size = weight.shape
    out = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    shape = _tile(average, x.dtype)
    tiles = min(triton.cdiv(pairs, shape.rows) + count, pairs)
    _fp4_matmul_kernel[(tiles, triton.cdiv(columns, shape.columns))](
        x,
        weight.codes,
        weight.scales.view(torch.int32),
        bias,
        ends,
        out,
        columns,
        size,
        count,
        weight.scales.shape[-1] // 4,
        tiles=Tiles(
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            COUNT=triton.next_power_of_2(count),
            SCALED=shape.rows >= 64,
            QUICK=is_quick(weight.codes, x.dtype),
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
    if rows_per_expert < 12:
        return TileShape(16, 128, 128, stages=3)
    if rows_per_expert < 48:
        return TileShape(32, 64, 128, stages=3)
    if rows_per_expert < 96:
        return TileShape(64, 128, 128, stages=3, warps=8)
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
    weight_row = expert.to(tl.int64) * columns + column
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * size
    codes_ptrs = codes_ptr + weight_row[:, None] * (size // 2)
    scales_ptrs = scales_ptr + weight_row * scale_words
    is_column, is_row = column < columns, row < end
    half = tl.arange(0, _HALF)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    scales = tl.load(scales_ptrs, mask=is_column, other=0)
    for start in range(0, size, _STEP):
        # The next scales are asked for before this step's product needs its own.
        has_later = is_column & (start + _STEP < size)
        later = tl.load(scales_ptrs + start // _STEP + 1, mask=has_later, other=0)
        for block in tl.static_range(2):
            byte = start // 2 + block * _HALF + half
            d = start + block * 2 * _HALF + half
            inside = is_column[:, None] & (byte[None, :] < size // 2)
            codes = tl.load(codes_ptrs + byte[None, :], mask=inside, other=0)
            x_inside = is_row[None, :] & (d[:, None] < size)
            low_x = tl.load(x_ptrs + d[:, None], mask=x_inside, other=0.0)
            high_x = tl.load(x_ptrs + d[:, None] + _HALF, mask=x_inside, other=0.0)
            if tiles.SCALED:
                low, high = scaled_numbers(codes, scales >> (16 * block), dtype, tiles.QUICK)
                total = tl.dot(low, low_x, total, input_precision=tiles.PRECISION)
                total = tl.dot(high, high_x, total, input_precision=tiles.PRECISION)
            else:
                low = numbers(codes, False, dtype, tiles.QUICK)
                high = numbers(codes, True, dtype, tiles.QUICK)
                sums = tl.dot(low, low_x, input_precision=tiles.PRECISION)
                total += sums * _power(scales, 2 * block)[:, None]
                sums = tl.dot(high, high_x, input_precision=tiles.PRECISION)
                total += sums * _power(scales, 2 * block + 1)[:, None]
        scales = later
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * columns + column, mask=is_column, other=0.0)
        total += bias.to(tl.float32)[:, None]
    out_ptrs = out_ptr + row[:, None].to(tl.int64) * columns + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _power(scales, index):
    """One of four e8m0 scales in int32 as float32."""
    return (((scales >> (8 * index)) & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def numbers(codes, HIGH: tl.constexpr, dtype: tl.constexpr, QUICK: tl.constexpr):
    """The numbers in the low or the high bits of bytes [C, 32], without their scales.

    Of one operation with one argument Triton keeps the numbers in registers on their way to the
    tensor cores.
    """
    if QUICK:
        return tl.inline_asm_elementwise(
            _HIGH if HIGH else _LOW, "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    code = codes.to(tl.int32)
    code = (code >> 4) if HIGH else (code & 15)
    size = (code & 7).to(tl.float32)  # halves up to 2, then 2, 3, 4 and 6
    size = tl.where(size < 4, size * 0.5, tl.where(size < 6, size - 2.0, size * 2.0 - 8.0))
    return tl.where(code & 8 > 0, -size, size).to(dtype)


@triton.jit
def scaled_numbers(codes, scales, dtype: tl.constexpr, QUICK: tl.constexpr):
    """The numbers in the low and in the high bits, times the first two of `scales` [C] int32.

    They go through shared memory, which pays where many rows share a tile of weights.
    """
    if QUICK:
        # The factors 2^(s - 1). (Of s = 0 and 1, too: no weight is so small.)
        low = (((scales & 255) << 7) + 0x3F00).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (((scales >> 8 & 255) << 7) + 0x3F00).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.inline_asm_elementwise(
            _BOTH,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [codes, low[:, None], high[:, None]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    low = numbers(codes, False, tl.float32, False) * _power(scales, 0)[:, None]
    high = numbers(codes, True, tl.float32, False) * _power(scales, 1)[:, None]
    return low.to(dtype), high.to(dtype)
