"""RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight, statistics in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Over the last dimension; input and output in the model's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # torch's own CPU version takes three times as long (docs/performance.md).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        return (x * scale).to(x.dtype) * self.weight


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in float64: the oracle of the tests."""
    wide = x.double()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.double()).to(x.dtype)
