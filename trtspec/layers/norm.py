"""The RMSNorm layer; its operation is in `ops/layer/norm.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.layer.norm import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension; input and output in the model's dtype."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self)
