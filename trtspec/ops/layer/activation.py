"""The elementwise half of SwiGLU, and of GeGLU (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import twin


@twin("layer.triton_activation")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [T, I], of gate_up [T, 2I], gate before up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@twin("layer.triton_activation")
def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) * up, [T, I], with gelu's approximation by tanh; gate_up is [T, 2I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_silu_and_mul(gate_up: Tensor, limit: float) -> Tensor:
    """Returns min(silu(gate), limit) * up within ±limit, [T, I]; gate_up is [T, 2I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def gate_and_mul(activation: str, limit: float | None = None) -> Callable[[Tensor], Tensor]:
    """Returns the function of gate_up that an activation's name stands for.

    Args:
        limit: of "silu" alone; None is none.
    """
    if activation == "gelu_tanh":
        assert limit is None
        return gelu_tanh_and_mul
    return silu_and_mul if limit is None else partial(clamped_silu_and_mul, limit=limit)
