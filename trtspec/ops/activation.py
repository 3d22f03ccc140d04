"""The elementwise half of SwiGLU, and of GeGLU (Shazeer, 2020)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .dispatch import triton_kernels


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
