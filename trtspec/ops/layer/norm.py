"""RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight, statistics in fp32.

Some families (Gemma, Step-3.5) write the weight as a difference from one: `offset` is added to it
in fp32, before the product is rounded to the model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch.dispatch import kernels


class Norm(Protocol):
    """What an op reads of a norm; `layers.norm.RMSNorm` is one."""

    eps: float
    offset: float
    twice: Tensor | None  # [2D], whose first half is the weight's memory (`RMSNorm.pack`)

    @property
    def weight(self) -> Tensor:  # [D], model dtype
        ...


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalizes x [..., D] over its last dimension.

    Returns:
        [..., D] in the dtype of x. Its rows may be apart in memory.
    """
    is_trained = norm.weight.requires_grad and torch.is_grad_enabled()
    triton = None if is_trained else kernels("layer.triton_norm", x)
    if triton is not None:
        return triton.rms_norm(x, norm)
    if norm.offset:
        weight = norm.weight.float() + norm.offset
        return F.rms_norm(x.float(), weight.shape, weight, norm.eps).to(x.dtype)
    twice = None if is_trained else norm.twice
    # A weight that was replaced is elsewhere.
    if twice is not None and (twice.dtype, twice.data_ptr()) == (x.dtype, norm.weight.data_ptr()):
        # Three operations, where torch computes RMSNorm by a dozen: with -x beside x the mean is 0,
        # but for float32's rounding of the largest numbers.
        both = torch.layer_norm(torch.cat((x, -x), dim=-1), twice.shape, twice, None, norm.eps)
        return both[..., : x.shape[-1]]
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def add_normed(residual: Tensor, x: Tensor, norm: Norm, scalar: Tensor | None = None) -> Tensor:
    """Returns (residual + norm(x)) * scalar: residual and x [T, D], scalar [1] -> [T, D]."""
    wants_gradient = torch.is_grad_enabled() and any(
        t.requires_grad for t in (residual, x, norm.weight)
    )
    is_served = not wants_gradient and residual.dtype == x.dtype
    triton = kernels("layer.triton_norm", x) if is_served else None
    if triton is not None:
        return triton.add_normed(residual, x, norm, scalar)
    total = residual + rms_norm(x, norm)
    return total if scalar is None else total * scalar
