"""The Triton kernels of `fp8.py`: products of some ten to 256 rows, and weights made float.

A product is split along K until there are enough programs to keep the memory busy. The parts of a
sum are added in a fixed order by a second kernel, in float32.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from ..launch.triton import after_previous, dependent_launch
from .fp8 import Fp8Weight

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def codes_to(codes, dtype: tl.constexpr, QUICK: tl.constexpr):
    """e4m3 codes as numbers of a float dtype, exactly.

    Args:
        QUICK: the codes are uint8 and the dtype is bfloat16. Triton's own way takes four
            conversions for two numbers, which is slower than memory brings them. Here two codes
            become float16 at once, and then bits are moved: a bf16 with float16's exponent and
            first digits is 2^112 times too small. (NaN becomes a number; weights have none.)
    """
    if QUICK:  # pairs, as they lie beside each other where a tensor core reads them
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 halves, bits, power;
            cvt.rn.f16x2.e4m3x2 halves, $1;
            shr.b32 bits, halves, 3;
            and.b32 bits, bits, 0x0fff0fff;
            lop3.b32 bits, halves, 0x80008000, bits, 0xea;
            mov.b32 power, 0x77807780;
            mul.rn.bf16x2 $0, bits, power;
            }
            """,
            "=r,h",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return codes.to(tl.float32).to(dtype)


@triton.jit
def nearest_codes(y):
    """float32 numbers as codes, uint8: to nearest, even in ties, cut off at ±448; NaN stays."""
    if INTERPRETED:
        return _nearest_codes(y)
    elif cuda_capability_geq(9, 0):
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _nearest_codes(y)


@triton.jit
def _nearest_codes(y):
    """The same by integers. Triton's own rounding loses the carry from mantissa to exponent in its
    interpreter, rounds twice on compute capability 8.9, and is not had before."""
    magnitude = tl.minimum(tl.abs(y), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # A float32 has 20 bits of mantissa more, and an exponent that is 120 larger.
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the last bit of a float32 at 2^14.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, small, code)
    code = code | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(y != y, 0x7F, code).to(tl.uint8)


def is_quick(codes: Tensor, dtype: torch.dtype) -> bool:
    """Whether `codes_to` may move bits for codes on this device."""
    return (
        codes.is_cuda
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(codes.device) >= (9, 0)
    )


def as_read(codes: Tensor, quick: bool) -> Tensor:
    """Returns the codes in the dtype that `codes_to` reads."""
    return codes.view(torch.uint8) if quick else codes


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """As its twin."""
    rows, columns = weight.codes.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.codes.device)
    quick = is_quick(weight.codes, dtype)
    block = min(4096, triton.next_power_of_2(columns))
    _dequantize_kernel[(rows, triton.cdiv(columns, block))](
        as_read(weight.codes, quick),
        weight.scales,
        out,
        columns,
        weight.scales.shape[1],
        weight.group,
        QUICK=quick,
        BLOCK=block,
        **dependent_launch(weight.codes),
    )
    return out


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    columns,
    groups,
    group,
    QUICK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK numbers of one row."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    codes = tl.load(codes_ptr + row * columns + column, mask=inside, other=0.0)
    scales = tl.load(scales_ptr + row * groups + column // group, mask=inside, other=0.0)
    value = codes_to(codes, tl.bfloat16 if QUICK else tl.float32, QUICK).to(tl.float32) * scales
    tl.store(out_ptr + row * columns + column, value.to(out_ptr.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """What one program of a product computes."""

    ROWS: int  # of x
    OUT: int  # of the weight's rows
    DEPTH: int  # columns at a time; with groups, at most a group
    BY_ROWS: bool
    QUICK: bool
    PRECISION: str


class Plan(NamedTuple):
    rows: int
    out: int
    depth: int
    parts: int
    stages: int
    warps: int


def multiply_floats(x: Tensor, weight: Fp8Weight, residual: Tensor | None = None) -> Tensor:
    """As its twin."""
    (rows, size), out = x.shape, weight.codes.shape[0]
    result = residual
    if result is None:
        result = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    plan = _plan(rows, out, size, x.dtype)
    depth = plan.depth if weight.by_rows else math.gcd(plan.depth, weight.group)
    quick = is_quick(weight.codes, x.dtype)
    steps = triton.cdiv(triton.cdiv(size, depth), plan.parts)
    parts = triton.cdiv(size, depth * steps)
    sums = torch.empty((parts, rows, out), dtype=torch.float32, device=x.device)
    _product_kernel[(triton.cdiv(out, plan.out), triton.cdiv(rows, plan.rows), parts)](
        x,
        as_read(weight.codes, quick),
        weight.scales,
        sums,
        rows,
        out,
        size,
        x.stride(0),
        weight.scales.shape[1],
        weight.group,
        steps,
        tiles=Tiles(
            ROWS=plan.rows,
            OUT=plan.out,
            DEPTH=depth,
            BY_ROWS=weight.by_rows,
            QUICK=quick,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ),
        num_stages=plan.stages,
        num_warps=plan.warps,
        **dependent_launch(x),
    )
    parts, block = sums.shape[0], min(1024, triton.next_power_of_2(out))
    _sum_kernel[(rows, triton.cdiv(out, block))](
        sums,
        result,
        rows * out,
        out,
        result.stride(0),
        PARTS=parts,
        ADDS=residual is not None,
        BLOCK=block,
        **dependent_launch(sums),
    )
    return result


def _plan(rows: int, out: int, size: int, dtype: torch.dtype) -> Plan:
    """Returns the tiles of a product, by measurement on an H200."""
    if dtype == torch.float32:
        return Plan(rows=16 if rows <= 16 else 64, out=64, depth=32, parts=1, stages=2, warps=4)
    per_tile = max(16, min(128, triton.next_power_of_2(rows)))
    tile = 64 if rows <= 16 or (rows <= 64 and out <= 6144) else 128
    parts = max(1, min(4, size // 512, 400 // triton.cdiv(out, tile)))
    warps = 8 if per_tile > 64 else 4
    return Plan(rows=per_tile, out=tile, depth=128, parts=parts, stages=3, warps=warps)


@triton.jit
def _product_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    sums_ptr,
    rows,
    out,
    size,
    x_row,
    groups,
    group,
    steps,
    tiles: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum over one part of K of one tile, weights first: [OUT, ROWS]."""
    OUT: tl.constexpr = tiles.OUT
    ROWS: tl.constexpr = tiles.ROWS
    DEPTH: tl.constexpr = tiles.DEPTH
    after_previous(PDL)
    n = tl.program_id(0) * OUT + tl.arange(0, OUT)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    k = tl.arange(0, DEPTH)
    codes_ptrs = codes_ptr + n.to(tl.int64)[:, None] * size
    x_ptrs = x_ptr + m.to(tl.int64)[None, :] * x_row
    scales_ptrs = scales_ptr + n.to(tl.int64) * groups
    total = tl.zeros([OUT, ROWS], tl.float32)
    begin = part * steps * DEPTH
    for start in range(begin, min(begin + steps * DEPTH, size), DEPTH):
        d = start + k
        inside = (n[:, None] < out) & (d[None, :] < size)
        codes = tl.load(codes_ptrs + d[None, :], mask=inside, other=0.0)
        x_inside = (d[:, None] < size) & (m[None, :] < rows)
        x = tl.load(x_ptrs + d[:, None], mask=x_inside, other=0.0)
        weight = codes_to(codes, x.dtype, tiles.QUICK)
        if tiles.BY_ROWS:
            total = tl.dot(weight, x, total, input_precision=tiles.PRECISION)
        else:
            scale = tl.load(scales_ptrs + start // group, mask=n < out, other=0.0)
            total += scale[:, None] * tl.dot(weight, x, input_precision=tiles.PRECISION)
    if tiles.BY_ROWS:
        total *= tl.load(scales_ptrs, mask=n < out, other=0.0)[:, None]
    sums_ptrs = sums_ptr + (part.to(tl.int64) * rows + m[:, None]) * out + n[None, :]
    tl.store(sums_ptrs, tl.trans(total), mask=(m[:, None] < rows) & (n[None, :] < out))


@triton.jit
def _sum_kernel(
    sums_ptr,
    out_ptr,
    part_size,
    out,
    out_row,
    PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK numbers of one row: its parts, and what is there already."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < out
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums_ptr + part * part_size + row * out + n, mask=inside, other=0.0)
    target = out_ptr + row * out_row + n
    if ADDS:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)
