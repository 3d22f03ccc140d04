"""Matrix products with weights, packed once for the CPU.

`F.linear` on CPU hands oneDNN the weight in its plain layout at every call. Packing it once
halves the time of a step at 1-8 rows in bf16, takes a third of it in fp32, and makes a row's
result independent of how many rows share the call (docs/performance.md, docs/decisions/003).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_PACK_ROWS_HINT = 8  # a decoding step has few rows; prefill is not slower for it
# From this many inputs on oneDNN may split the sum of a *single* row over threads, which rounds
# differently from two and more rows. A second row costs nothing, so one is added.
_SPLITS_ONE_ROW = 1024


class Linear(nn.Module):
    """y = x W^T + b. `weight` [out, in]; after `pack()` on CPU the packed copy replaces it."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: Tensor | None = None
        self._pad_single_row = False

    def pack(self) -> None:
        """Replaces the weight by oneDNN's layout where the CPU can use it; else does nothing."""
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or not _can_pack(weight.dtype):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.data, _PACK_ROWS_HINT)
        self._pad_single_row = (
            weight.dtype == torch.bfloat16 and self.in_features >= _SPLITS_ONE_ROW
        )
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            if self._pad_single_row and x.shape[0] == 1:
                return self._packed_forward(torch.cat((x, x)))[:1]
            return self._packed_forward(x)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def _packed_forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
