"""The Triton kernels of `fp8.py` for activations in e4m3: one program works on one row, or a part.

The kernels of `csrc` round rows in the same way (fp8_linear.cuh).
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch
from .fp8 import FP8, LARGEST, SMALLEST, Fp8Rows, Rescaling
from .norm import Norm
from .triton_fp8 import nearest_codes

_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST)


def quantize_rows(x: Tensor, norm: Norm | None = None) -> Fp8Rows:
    """As its twin."""
    rows, size = x.shape
    out = _empty_rows(rows, size, x.device)
    if rows:
        _quantize_kernel[(rows,)](
            x,
            None if norm is None else norm.weight,
            out,
            x.stride(0),
            size,
            0.0 if norm is None else norm.eps,
            OFFSET=0.0 if norm is None else norm.offset,
            BLOCK=triton.next_power_of_2(size),
            num_warps=_warps(size),
            **dependent_launch(x),
        )
    return out


def rescale(
    product: Tensor, by: Rescaling, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """As its twin."""
    rows, size = product.shape
    out = residual
    if out is None:
        out = torch.empty((rows, size), dtype=dtype, device=product.device)
    block = min(1024, triton.next_power_of_2(size))
    if rows:
        _rescale_kernel[(rows, triton.cdiv(size, block))](
            product,
            by,
            out,
            size,
            out.stride(0),
            ADDS=residual is not None,
            BLOCK=block,
            num_warps=4,
            **dependent_launch(product),
        )
    return out


def rescaled_swiglu(product: Tensor, by: Rescaling) -> Fp8Rows:
    """As its twin."""
    rows, size = product.shape[0], product.shape[1] // 2
    out = _empty_rows(rows, size, product.device)
    if rows:
        _swiglu_kernel[(rows,)](
            product,
            by,
            out,
            size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=_warps(size),
            **dependent_launch(product),
        )
    return out


def _empty_rows(rows: int, size: int, device: torch.device) -> Fp8Rows:
    codes = torch.empty((rows, size), dtype=FP8, device=device)
    return Fp8Rows(codes, torch.empty(rows, dtype=torch.float32, device=device))


def _warps(size: int) -> int:
    """A thread has 16 numbers of a row; of one beyond 16,384 more."""
    return max(4, min(32, triton.next_power_of_2(size) // 512))


@triton.jit
def _store_codes(y, scale, inside, out, row, size, d):
    """A row y [BLOCK] float32, rounded, and its scale times `scale`."""
    largest = tl.max(tl.abs(y), 0)
    to_codes = tl.where(largest <= _SMALLEST, 0.0, tl.div_rn(_LARGEST, largest))
    codes = nearest_codes(y * to_codes)
    tl.store(out.codes + row * size + d, codes.to(tl.float8e4nv, bitcast=True), mask=inside)
    tl.store(out.scales + row, largest / _LARGEST * scale)


@triton.jit
def _quantize_kernel(
    x_ptr,
    weight_ptr,
    out,
    x_row,
    size,
    eps,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < size
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    after_previous(PDL)
    y = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if weight_ptr is not None:
        scale = tl.rsqrt(tl.sum(y * y, 0) / size + eps)
        y = y * weight
    _store_codes(y, scale, inside, out, row, size, d)


@triton.jit
def _rescaled(product_ptr, by, row, n, inside, at):
    """Values of a product at columns n."""
    value = tl.load(product_ptr + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(by.rows + row) * tl.load(by.columns + n, mask=inside, other=0.0)
    if by.bias is not None:
        value += tl.load(by.bias + n, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _rescale_kernel(
    product_ptr,
    by,
    out_ptr,
    size,
    out_row,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK numbers of one row."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    value = _rescaled(product_ptr, by, row, n, inside, row * size + n)
    target = out_ptr + row * out_row + n
    if ADDS:
        value += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(product_ptr, by, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row: gate before up."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < size
    at = row * 2 * size + d
    gate = _rescaled(product_ptr, by, row, d, inside, at)
    up = _rescaled(product_ptr, by, row, size + d, inside, at + size)
    _store_codes(gate / (1.0 + tl.exp(-gate)) * up, 1.0, inside, out, row, size, d)
