"""The elementwise half of SwiGLU, of GeGLU (Shazeer, 2020), and of their clamped variants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


@twin("layer.triton_activation")
def swish_and_mul_plus_one(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Returns g * sigmoid(alpha * g) * (u + 1), [T, I], with g = min(gate, limit) and u = up within
    ±limit; gate_up is [T, 2I]. (gpt-oss, arXiv:2508.10925.)"""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


@dataclass(frozen=True)
class GateAndMul:
    """What stands between a gated network's products: [T, 2I], gate before up, -> [T, I]."""

    is_gelu: bool = False  # else silu
    limit: float | None = None  # of silu, as of `clamped_silu_and_mul`; with alpha of gate and up
    alpha: float | None = None  # then it is `swish_and_mul_plus_one`, and has a limit

    def __call__(self, gate_up: Tensor) -> Tensor:
        if self.is_gelu:
            return gelu_tanh_and_mul(gate_up)
        if self.alpha is not None:
            assert self.limit is not None
            return swish_and_mul_plus_one(gate_up, self.alpha, self.limit)
        if self.limit is None:
            return silu_and_mul(gate_up)
        return clamped_silu_and_mul(gate_up, self.limit)


SWIGLU = GateAndMul()


def gate_and_mul(
    activation: str, limit: float | None = None, alpha: float | None = None
) -> GateAndMul:
    """Returns what an activation's name stands for; only "silu" has a limit, or alpha with one."""
    assert (limit is None and alpha is None) or activation == "silu"
    return GateAndMul(activation == "gelu_tanh", limit, alpha)
