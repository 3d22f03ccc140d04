"""The Triton kernels of `norm.py`: one program works on one row.

These are bound by launching, not by arithmetic, and what they save is launches.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch

if TYPE_CHECKING:
    from .norm import Norm


class Rows(NamedTuple):
    """Rows [T, D] and the stride between them."""

    x: Tensor
    row: int

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        return cls(x, x.stride(0))


class NormWeight(NamedTuple):
    weight: Tensor  # [D]
    eps: float


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """As its twin."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _rms_norm_kernel[(flat.shape[0],)](
        Rows.of(flat),
        NormWeight(norm.weight, norm.eps),
        out,
        size,
        OFFSET=norm.offset,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4 if size <= 2048 else 8,
        **dependent_launch(x),
    )
    return out.view(x.shape)


def add_normed(residual: Tensor, x: Tensor, norm: Norm, scalar: Tensor | None) -> Tensor:
    """As its twin."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    _add_normed_kernel[(rows,)](
        Rows.of(residual),
        Rows.of(x),
        NormWeight(norm.weight, norm.eps),
        scalar,
        out,
        size,
        OFFSET=norm.offset,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4 if size <= 2048 else 8,
        **dependent_launch(x),
    )
    return out


@triton.jit
def _rms_norm_kernel(
    rows, norm, out, size, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < size
    weight = tl.load(norm.weight + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    after_previous(PDL)
    x = tl.load(rows.x + row * rows.row + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + norm.eps)
    tl.store(out + row * size + d, (x * scale * weight).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_normed_kernel(
    residual_rows,
    rows,
    norm,
    scalar,
    out,
    size,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < size
    weight = tl.load(norm.weight + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    after_previous(PDL)
    x = tl.load(rows.x + row * rows.row + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + norm.eps)
    residual = tl.load(residual_rows.x + row * residual_rows.row + d, mask=inside, other=0.0)
    # Rounded in between, as torch's operations do.
    total = (x * scale * weight).to(kind).to(tl.float32) + residual.to(tl.float32)
    if scalar is not None:
        total = total.to(kind).to(tl.float32) * tl.load(scalar).to(tl.float32)
    tl.store(out + row * size + d, total.to(kind), mask=inside)
