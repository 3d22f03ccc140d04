"""The Triton kernel of `activation.py`."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As its twin."""
    return _activate_and_mul(gate_up, is_gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """As its twin."""
    return _activate_and_mul(gate_up, is_gelu=True)


def swish_and_mul_plus_one(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """As its twin."""
    return _activate_and_mul(gate_up, swish=Swish(alpha, limit))


class Swish(NamedTuple):
    alpha: float
    limit: float


def _activate_and_mul(gate_up: Tensor, is_gelu: bool = False, swish: Swish | None = None) -> Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(inner))
    _activate_and_mul_kernel[(rows, triton.cdiv(inner, block))](
        gate_up,
        out,
        gate_up.stride(0),
        inner,
        swish,
        IS_GELU=is_gelu,
        BLOCK=block,
        num_warps=4,
        **dependent_launch(gate_up),
    )
    return out


@triton.jit
def _activate_and_mul_kernel(
    x_ptr,
    out_ptr,
    x_row,
    inner,
    swish,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK numbers of one row."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < inner
    gate = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_row + inner + d, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    if swish is not None:  # (minimum and maximum would drop NaN)
        x = tl.where(x > swish.limit, swish.limit, x)
        y = up.to(tl.float32)
        y = tl.where(y > swish.limit, swish.limit, tl.where(y < -swish.limit, -swish.limit, y))
        value = x / (1.0 + tl.exp(-swish.alpha * x)) * (y + 1.0)
        tl.store(out_ptr + row * inner + d, value.to(out_ptr.dtype.element_ty), mask=inside)
        return
    z = x
    if IS_GELU:  # (1 + tanh(y)) / 2 is the logistic function of 2 y; y = sqrt(2 / pi) (x + …)
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    activated = x / (1.0 + tl.exp(-z))
    # Rounded in between, as torch's two operations do.
    value = activated.to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * inner + d, value.to(out_ptr.dtype.element_ty), mask=inside)
