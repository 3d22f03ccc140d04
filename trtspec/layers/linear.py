"""Matrix products with weights, packed once for the CPU.

`F.linear` on CPU hands oneDNN the weight in its plain layout at every call. Packing it once halves
the time of these products at 1-8 rows, in bf16 and in fp32 (docs/performance.md).

In bf16 a row's result must also not depend on how many rows share the call, or greedy text with and
without speculation would differ at near-ties (docs/decisions/003). oneDNN mostly keeps that, but on
some shapes, processors and thread counts it splits the sum of few rows differently. So each shape
is tried once. Calls with fewer rows than `_min_rows` are padded: from that number on, all calls up
to 9 rows (K = 8) agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed.comm import ALONE, Communicator
from ..distributed.parallel import WHOLE, Shard
from ..ops.launch.machine import INVARIANT_ROWS
from ..ops.layer import cublaslt, four_bits, fp8
from ..ops.layer.four_bits import FourBitWeight
from ..ops.layer.fp8 import Fp8Weight

_PACK_ROWS_HINT = 8  # a decoding step has few rows; prefill is not slower for it


class Linear(nn.Module):
    """y = x W^T + b. `weight` [out, in]; after `pack()` on CPU the packed copy replaces it.

    After `hold_fp8` the weight has FP8 codes, and `scales` what they are multiplied by. After
    `hold_four_bits` there is `four_bits` in place of a weight.

    Args:
        in_features, out_features: of the part of the weight that this rank holds.
        shard: which part that is.
        sums_over: of a weight cut along its inputs, the ranks with the other parts: `fused.linear`
            adds up what they return. The first rank alone has the bias; the others' is zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        shard: Shard = WHOLE,
        sums_over: Communicator = ALONE,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.shard, self.sums_over = shard, sums_over
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features), requires_grad=False
        )
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.scales: nn.Parameter | None = None  # [out, ceil(in / group)] float32, of FP8 codes
        self.group = in_features
        self.records: nn.Parameter | None = None  # of `FourBitWeight`
        self.row_scales: nn.Parameter | None = None
        self._packed: Tensor | None = None
        self._min_rows = 1

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Returns a layer of a weight [out, in] and a bias [out], in their memory."""
        with torch.device("meta"):
            layer = cls(weight.shape[1], weight.shape[0], bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer

    def hold_fp8(self, weight: Fp8Weight) -> None:
        """Replaces the weight by an FP8 one, which this keeps as it is."""
        self.weight = nn.Parameter(weight.codes, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)
        self.group = weight.group

    @property
    def fp8(self) -> Fp8Weight | None:
        """The weight where it is FP8, else None."""
        if self.scales is None or self.weight is None:
            return None
        return Fp8Weight(self.weight, self.scales, self.group)

    def hold_four_bits(self, weight: FourBitWeight) -> None:
        """Replaces the weight by one of 4 bits, which this keeps as it is."""
        self.weight = None
        self.records = nn.Parameter(weight.records, requires_grad=False)
        if weight.row_scales is not None:
            self.row_scales = nn.Parameter(weight.row_scales, requires_grad=False)

    @property
    def four_bits(self) -> FourBitWeight | None:
        """The weight where it has 4 bits, else None."""
        return None if self.records is None else FourBitWeight(self.records, self.row_scales)

    def pack(self) -> None:
        """Replaces the weight by oneDNN's layout where the CPU can use it; else does nothing.

        An FP8 weight stays.
        """
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or not _can_pack(weight.dtype):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.data, _PACK_ROWS_HINT)
        self.weight = None
        if weight.dtype == torch.bfloat16:
            threads = torch.get_num_threads()
            self._min_rows = _min_rows(self.in_features, self.out_features, threads)

    def at(self, outputs: Tensor) -> Linear:
        """Returns a layer with copies of these outputs, [n] int64, which is not packed."""
        weight = self.weight if self._packed is None else self._packed.to_dense()
        assert weight is not None
        outputs = outputs.to(weight.device)
        part = Linear.of(weight.data[outputs], None if self.bias is None else self.bias[outputs])
        if (held := self.fp8) is not None:
            part.hold_fp8(held.at(outputs))
        return part

    def outputs_from(self, first: int) -> Linear | None:
        """Returns a layer of this memory with the outputs from `first` on; None if it is packed."""
        if self.weight is None or type(self) is not Linear:
            return None
        rest = Linear.of(self.weight[first:], None if self.bias is None else self.bias[first:])
        if (held := self.fp8) is not None:
            rest.hold_fp8(held.at(slice(first, None)))
        return rest

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            rows = x.shape[0]
            if rows < self._min_rows:
                x = torch.cat((x, x)) if self._min_rows == 2 else _pad_rows(x, self._min_rows)
                return _multiply(x, self._packed, self.bias)[:rows]
            return _multiply(x, self._packed, self.bias)
        if (packed := self.four_bits) is not None:
            return four_bits.multiply(x, packed, bias=self.bias)
        assert self.weight is not None
        if (held := self.fp8) is not None:
            return fp8.multiply(x, held, self.bias)
        if self.bias is None and (out := cublaslt.multiply(x, self.weight)) is not None:
            return out
        return F.linear(x, self.weight, self.bias)


@cache
def _min_rows(in_features: int, out_features: int, num_threads: int) -> int:
    """Returns `find_min_rows` of oneDNN's kernel for a shape and a number of threads."""
    ones = torch.ones(out_features, in_features, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(ones, _PACK_ROWS_HINT)
    return find_min_rows(partial(_multiply, weight=packed, bias=None), in_features)


def find_min_rows(multiply: Callable[[Tensor], Tensor], in_features: int) -> int:
    """Returns the fewest of 1, 2 and 9 rows to pad to, so that a row's bits ignore their number.

    Args:
        multiply: x [n, in] bf16 -> x times a weight of ones. The inputs cancel but for rounding,
            so that any change in the order of the sum shows.
    """
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(4, INVARIANT_ROWS, in_features // 2, generator=generator)
    # So far apart that sums of few inputs are rounded too: exact ones would not show their order.
    half = half * 2.0 ** torch.randint(-16, 16, half.shape, generator=generator)
    shuffled = half[..., torch.randperm(in_features // 2, generator=generator)]
    trials = F.pad(torch.cat([half, -shuffled], dim=-1), (0, in_features % 2)).bfloat16()
    full = [multiply(x) for x in trials]
    for least in (1, 2):
        if all(
            torch.equal(multiply(_pad_rows(x[:n], least))[:n], y[:n])
            for x, y in zip(trials, full, strict=True)
            for n in range(1, INVARIANT_ROWS)
        ):
            return least
    return INVARIANT_ROWS


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, max(0, rows - x.shape[0])))


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
