"""The elementwise half of SwiGLU, and of GeGLU (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import triton_kernels


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] holding gate then up -> silu(gate) * up, [T, I]."""
    kernels = triton_kernels(gate_up)
    if kernels is not None:
        return kernels.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] holding gate then up -> gelu(gate) * up by gelu's approximation with tanh, [T, I]."""
    kernels = triton_kernels(gate_up)
    if kernels is not None:
        return kernels.gelu_tanh_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_silu_and_mul(gate_up: Tensor, limit: float) -> Tensor:
    """[T, 2I] holding gate then up -> min(silu(gate), limit) * up within ±limit, [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def gate_and_mul(activation: str, limit: float | None = None) -> Callable[[Tensor], Tensor]:
    """The function of [T, 2I] that an activation's name and, of "silu", a limit stand for."""
    if activation == "gelu_tanh":
        assert limit is None
        return gelu_tanh_and_mul
    return silu_and_mul if limit is None else partial(clamped_silu_and_mul, limit=limit)
