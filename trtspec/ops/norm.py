"""RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight, statistics in fp32.

Some families (Gemma, Step-3.5) write the weight as a difference from one: `offset` is added to it
in fp32, before the product is rounded to the model's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dispatch import triton_kernels


class RMSNorm(nn.Module):
    """Over the last dimension; input and output in the model's dtype."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        is_trained = self.weight.requires_grad and torch.is_grad_enabled()
        kernels = None if is_trained else triton_kernels(x)
        if kernels is not None:
            return kernels.rms_norm(x, self.weight, self.eps, self.offset)
        if self.offset:
            weight = self.weight.float() + self.offset
            return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def add_normed(residual: Tensor, x: Tensor, norm: RMSNorm, scalar: Tensor | None = None) -> Tensor:
    """(residual + norm(x)) * scalar: residual and x [T, D], scalar [1] -> [T, D]."""
    wants_gradient = torch.is_grad_enabled() and any(
        t.requires_grad for t in (residual, x, norm.weight)
    )
    kernels = None if wants_gradient or residual.dtype != x.dtype else triton_kernels(x)
    if kernels is not None:
        return kernels.add_normed(residual, x, norm.weight, norm.eps, norm.offset, scalar)
    total = residual + norm(x)
    return total if scalar is None else total * scalar
