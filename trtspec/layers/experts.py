"""The layer of a mixture's experts; its operations are in `ops/experts/`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import native
from ..distributed.parallel import WHOLE, Shard
from ..ops.experts.fp4 import Fp4Weight
from ..ops.experts.torch import ExpertBiases, Quantized, floats_of, grouped_experts
from ..ops.layer.activation import SWIGLU, GateAndMul
from ..ops.layer.four_bits import FourBitWeight
from ..ops.layer.fp8 import Fp8Weight
from .linear import Linear

MAX_ROWS, MAX_CHOICES, MAX_EXPERTS = 8, 16, 1024
MAX_RESTING_BYTES = 104 << 10
"""What the kernels for few rows take (csrc/include/trtspec/expert_linear.cuh), and how much of rows
they keep in shared memory."""
MAX_RESTING_BYTES_OF_RECORDS = 87 << 10
"""The same beside weights of INT4, whose scales take more."""
MAX_FP8_ROWS, MAX_FP8_VALUES = 4, 2_000_000
"""Of FP8 weights: up to this many rows and values of a down_proj they are faster than Triton's."""
MAX_FP4_ROWS, MAX_RECORD_ROWS = 2, 4
"""The same of MXFP4, and of INT4 and NVFP4. More rows go through `ops/experts/tiles.py`, whose
kernel needs two small ones beside it."""


class Experts(nn.Module):
    """E gated networks, of which each row goes through some.

    They have `gate_up_proj` [E, 2I, D] and `down_proj` [E, D, I], perhaps with biases. After
    `pack()` on CPU each expert's packed `Linear`s replace the weights. After `hold` these are codes
    of 8 or 4 bits, and `gate_up_scales` and `down_scales` what those are multiplied by.

    Args:
        gate_and_mul: what stands between the two products, [n, 2I] -> [n, I].
        num_experts: of this rank, from expert `first` of `total` on. The others add nothing here.
        has_bias: they have `gate_up_proj_bias` [E, 2I] and `down_proj_bias` [E, D].
        inner: I, of the part that this rank has of each expert's width; `shard` says which part.
    """

    def __init__(
        self,
        num_experts: int,
        size: int,
        inner: int,
        gate_and_mul: GateAndMul = SWIGLU,
        *,
        has_bias: bool = False,
        first: int = 0,
        total: int | None = None,
        shard: Shard = WHOLE,
    ):
        super().__init__()
        self.first, self.total, self.shard = first, total or num_experts, shard
        self.num_experts, self.size, self.inner = num_experts, size, inner
        self.gate_and_mul = gate_and_mul
        self.gate_up_proj: nn.Parameter | None = nn.Parameter(
            torch.empty(num_experts, 2 * inner, size), requires_grad=False
        )
        self.down_proj: nn.Parameter | None = nn.Parameter(
            torch.empty(num_experts, size, inner), requires_grad=False
        )
        self.gate_up_proj_bias = self.down_proj_bias = None
        if has_bias:
            self.gate_up_proj_bias = _empty_bias(num_experts, 2 * inner)
            self.down_proj_bias = _empty_bias(num_experts, size)
        self.kind: type[Quantized] | None = None  # of weights that are held
        self.gate_up_scales: nn.Parameter | None = None
        self.down_scales: nn.Parameter | None = None
        self.gate_up_group, self.down_group = size, inner
        self._packed: list[tuple[Linear, Linear]] = []

    def hold(self, gate_up: Quantized, down: Quantized) -> None:
        """Replaces the weights by quantised stacks, both of one kind, which this keeps as they
        are."""
        self.kind = type(gate_up)
        (codes, scales), (down_codes, down_scales) = gate_up[:2], down[:2]
        self.gate_up_proj = nn.Parameter(codes, requires_grad=False)
        self.down_proj = nn.Parameter(down_codes, requires_grad=False)
        if scales is not None:  # else they lie among the codes
            self.gate_up_scales = nn.Parameter(scales, requires_grad=False)
        if down_scales is not None:
            self.down_scales = nn.Parameter(down_scales, requires_grad=False)
        if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
            self.gate_up_group, self.down_group = gate_up.group, down.group

    @property
    def biases(self) -> ExpertBiases | None:
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            return None
        return ExpertBiases(self.gate_up_proj_bias, self.down_proj_bias)

    def _biases_of(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """Of the two products."""
        first, second = self.gate_up_proj_bias, self.down_proj_bias
        return (None, None) if first is None or second is None else (first[expert], second[expert])

    @property
    def held(self) -> tuple[Quantized, Quantized] | None:
        """The stacks `gate_up_proj` and `down_proj` where they are quantised, else None."""
        up, down, up_scales, down_scales = (
            self.gate_up_proj, self.down_proj, self.gate_up_scales, self.down_scales,
        )  # fmt: skip
        if self.kind is None or up is None or down is None:
            return None
        if self.kind is FourBitWeight:
            return FourBitWeight(up, up_scales), FourBitWeight(down, down_scales)
        assert up_scales is not None and down_scales is not None
        if self.kind is Fp4Weight:
            return Fp4Weight(up, up_scales), Fp4Weight(down, down_scales)
        first = Fp8Weight(up, up_scales, self.gate_up_group)
        return first, Fp8Weight(down, down_scales, self.down_group)

    def pack(self) -> None:
        """Packs every expert as `Linear.pack` does; does nothing off the CPU, nor to codes."""
        if self.gate_up_proj is None or self.gate_up_proj.device.type != "cpu":
            return
        if self.kind is not None:
            return
        assert self.down_proj is not None
        for expert in range(self.num_experts):
            of_expert = self.gate_up_proj.data[expert], self.down_proj.data[expert]
            first, second = map(_packed, of_expert, self._biases_of(expert))
            self._packed.append((first, second))
        self.gate_up_proj = self.down_proj = None

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """Returns the sum over each row's experts of weight times expert(x), added up in float32.

        Args:
            x: [T, D]. ids, weights: [T, k] int64 and float32, as `route` returns them.
            residual: [T, D] that the sum is added to; without autograd in its memory.

        Returns:
            [T, D], x's dtype; with several ranks, this one's part of the sum.
        """
        inputs = (x, weights) if residual is None else (x, weights, residual)
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        kernels = None if wants_gradient else self._kernels(x, ids)
        if kernels is not None:
            return self._by_kernels(kernels, x, ids, weights, residual)
        if residual is None or not torch.is_grad_enabled():
            return self._routed(x, ids, weights, residual)
        return residual + self._routed(x, ids, weights, None)

    def _kernels(self, x: Tensor, ids: Tensor) -> Any:
        """Returns the module with the kernels for few rows if they serve these, else None."""
        if not x.is_cuda:
            return None
        rows, size = x.shape
        has_records = self.kind is FourBitWeight
        room = MAX_RESTING_BYTES_OF_RECORDS if has_records else MAX_RESTING_BYTES
        is_few = 0 < rows <= MAX_ROWS and rows * (2 * size + 64) <= room
        is_small = ids.shape[1] <= MAX_CHOICES and self.num_experts <= MAX_EXPERTS
        is_readable = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
        serves = self._serves_floats if self.kind is None else self._serves_codes
        bias = self.gate_up_proj_bias
        is_same = bias is None or bias.dtype == x.dtype
        if not (is_few and is_small and is_readable and is_same and serves(x)):
            return None
        return native.kernels(x)

    def _serves_floats(self, x: Tensor) -> bool:
        has_steps = self.size % 32 == 0 and self.inner % 32 == 0
        assert self.gate_up_proj is not None
        is_half = x.dtype in (torch.bfloat16, torch.float16)
        return is_half and x.dtype == self.gate_up_proj.dtype and has_steps

    def _serves_codes(self, x: Tensor) -> bool:
        has_steps = self.size % 64 == 0 and self.inner % 64 == 0
        if not (x.dtype == torch.bfloat16 and has_steps):
            return False
        if self.kind is Fp4Weight:
            return x.shape[0] <= MAX_FP4_ROWS
        if self.kind is FourBitWeight:
            assert self.gate_up_proj is not None and self.down_proj is not None
            is_one_form = self.gate_up_proj.shape[-1] == self.down_proj.shape[-1]
            return x.shape[0] <= MAX_RECORD_ROWS and is_one_form
        of_groups = (self.gate_up_group, self.size), (self.down_group, self.inner)
        has_groups = all(group % 64 == 0 or group >= columns for group, columns in of_groups)
        is_faster = x.shape[0] <= MAX_FP8_ROWS and self.size * self.inner <= MAX_FP8_VALUES
        return has_groups and is_faster

    def _by_kernels(
        self, kernels: Any, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None
    ) -> Tensor:
        """`forward` by two kernels, which pass over the experts of other ranks."""
        between = self.gate_and_mul
        in_place = residual is not None and not torch.is_grad_enabled()
        out = residual if residual is not None and in_place else torch.empty_like(x)
        kernels.experts(
            x,
            (ids - self.first if self.first else ids).contiguous(),
            weights.contiguous(),
            self.gate_up_proj,
            self.gate_up_scales,
            self.gate_up_group,
            self.gate_up_proj_bias,
            self.down_proj,
            self.down_scales,
            self.down_group,
            self.down_proj_bias,
            between.is_gelu,
            math.inf if between.limit is None else between.limit,
            between.alpha or 0.0,
            residual,
            x.new_empty(ids.numel(), self.inner),
            out,
        )
        return out

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """`forward` by products over each expert's rows; a residual takes the sum."""
        if self.num_experts < self.total:
            ids = ids - self.first
            ids = torch.where((ids < 0) | (ids >= self.num_experts), self.num_experts, ids)
        if not x.is_cuda:
            out = self._expert_by_expert(x, ids, weights)
            return out if residual is None else residual.add_(out)
        assert self.gate_up_proj is not None and self.down_proj is not None
        gate_up, down = self.held or (self.gate_up_proj, self.down_proj)
        of_rows = x, ids, weights
        between, biases = self.gate_and_mul, self.biases
        return grouped_experts(*of_rows, gate_up, down, between, self.total, biases, residual)

    def _expert_by_expert(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Runs the experts that were chosen, each over its rows.

        A row is summed in the order of its experts, whatever rows are beside it. (Asking which were
        chosen is free on the CPU.)
        """
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids[ids < self.num_experts].unique().tolist():
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            y = self._expert(expert, x[rows]).float() * weights[rows, choices, None]
            out = out.index_add(0, rows, y)
        return out.to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        """x [n, D] -> [n, D]."""
        if self._packed:
            first, second = self._packed[expert]
            return second(self.gate_and_mul(first(x)))
        up_bias, down_bias = self._biases_of(expert)
        if (held := self.held) is not None:
            gate_up, down = (floats_of(stack, expert, x.dtype) for stack in held)
        else:
            assert self.gate_up_proj is not None and self.down_proj is not None
            gate_up, down = self.gate_up_proj[expert], self.down_proj[expert]
        return F.linear(self.gate_and_mul(F.linear(x, gate_up, up_bias)), down, down_bias)


def _empty_bias(count: int, size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, size), requires_grad=False)


def _packed(weight: Tensor, bias: Tensor | None) -> Linear:
    linear = Linear.of(weight.contiguous(), bias)
    linear.pack()
    return linear
