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
        self.twice: Tensor | None = None

    def pack(self) -> None:
        """On a CPU in bfloat16: makes the weight the first half of `twice`, which `rms_norm` reads.

        The second half scales a copy of -x, which is thrown away.
        """
        is_cpu = self.weight.device.type == "cpu"
        if is_cpu and self.weight.dtype == torch.bfloat16 and self.offset == 0.0:
            self.twice = torch.cat((self.weight.data, self.weight.data))
            self.weight = nn.Parameter(self.twice[: len(self.weight)], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self)
