"""A quantised weight of a checkpoint, not yet read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..distributed.parallel import Cut
from ..errors import CheckpointError
from ..ops.layer.fp8 import Fp8Weight, dequantize
from .quantization import FP8
from .tensors import TensorSource


@dataclass(frozen=True)
class ScaledTensor:
    """A quantised weight [out, in], or a stack of them, as the checkpoint has it."""

    numbers: TensorSource
    scales: TensorSource
    shape: tuple[int, ...]  # of the scales, with as many dimensions as the numbers
    block: tuple[int, int] | None  # that shares a scale; None: a row does, or the whole weight

    @property
    def is_fp8(self) -> bool:
        return self.numbers.dtype == FP8

    def group(self, cut: Cut | None = None) -> int:
        """Returns how many columns share a scale, in all or in a cut.

        Where a cut begins within a block, narrower groups begin with it. All equal cuts have the
        same.
        """
        _, columns = self._columns(cut)
        if self.block is None:
            return columns
        is_cut = columns < self.numbers.shape[-1]
        group = math.gcd(self.block[1], columns) if is_cut else self.block[1]
        return min(group, columns)

    def rows(self, start: int, length: int) -> TensorSource | None:
        """Returns some of its rows as a quantised tensor; None: they begin within a block."""
        return self._part(self.numbers.rows(start, length), start, length)

    def expert_rows(self, expert: int, start: int, length: int) -> TensorSource | None:
        """The same of one matrix of a stack."""
        numbers = self.numbers.expert_rows(expert, start, length)
        return self._part(numbers, start, length, expert)

    def _part(
        self, numbers: TensorSource, start: int, length: int, expert: int | None = None
    ) -> TensorSource | None:
        height = 1 if self.block is None else self.block[0]
        if start % height:
            return None

        def of_part(scales: Tensor) -> Tensor:
            scales = scales.reshape(self.shape)
            scales = scales if expert is None else scales[expert]
            is_whole = self.block is None and scales.shape[0] == 1
            return scales if is_whole else scales[start // height : -(-(start + length) // height)]

        shape = tuple(of_part(torch.empty(self.shape, device="meta")).shape)
        scales = replace(
            self.scales, shape=shape, load=lambda: of_part(self.scales.read()), load_cut=None
        )
        kind = PackedTensor if isinstance(self, PackedTensor) else ScaledTensor
        return as_floats(numbers, kind(numbers, scales, shape, self.block))

    def _columns(self, cut: Cut | None) -> tuple[int, int]:
        """Returns where the columns of a cut begin, and how many there are."""
        if cut is None or cut.dim < len(self.numbers.shape) - 1:
            return 0, self.numbers.shape[-1]
        return cut.start, cut.length

    def read(self, cut: Cut | None = None) -> Fp8Weight:
        """Returns the numbers (INT8 ones too) and each row's scales; of a stack, stacks of both.

        Raises:
            CheckpointError: a number or a scale is NaN or infinite.
        """
        numbers, scales = self.numbers.read(cut), self.scales.read().float().reshape(self.shape)
        self._check_finite(numbers, scales)
        *stack, rows, _ = self.numbers.shape
        if self.block is not None:
            scales = scales.repeat_interleave(self.block[0], -2)[..., :rows, :]
        scales = scales.expand(*stack, rows, -1)
        group = self.group(cut)
        if cut is not None and cut.dim < len(stack) + 1:
            scales = scales.narrow(cut.dim, cut.start, cut.length)
        if self.block is not None:
            start, length = self._columns(cut)
            first = torch.arange(start, start + length, group)
            scales = scales[..., first // self.block[1]]
        return Fp8Weight(numbers, scales, group)

    def read_floats(self, cut: Cut | None = None) -> Tensor:
        """Returns the weights in float32."""
        return dequantize(self.read(cut), torch.float32)

    def _check_finite(self, numbers: Tensor, scales: Tensor) -> None:
        source, what = self.scales, "scales"
        bad = int((~torch.isfinite(scales)).sum())
        if not bad and self.is_fp8:  # e4m3 has no infinity, and NaN is 0x7f or 0xff
            source, what = self.numbers, "weights"
            magnitudes = numbers.view(torch.uint8).bitwise_and(127)
            if numbers.numel() and int(magnitudes.max()) == 127:
                bad = int((magnitudes == 127).sum())
        if bad:
            raise CheckpointError(
                f"{source.name} in {source.path} holds {bad} {what} that are NaN or infinite. Copy "
                "the checkpoint again from its source."
            )


class PackedTensor(ScaledTensor):
    """A weight [out, in] of 4 bits.

    A row never has one scale: then its product would round activations, which stay floats here.
    """

    def group(self, cut: Cut | None = None) -> int:
        """As of `ScaledTensor`, and half of the columns at most."""
        columns = self._columns(cut)[1]
        group = super().group(cut)
        return group if group < columns else math.gcd(group, columns // 2)


def as_floats(source: TensorSource, weight: ScaledTensor) -> TensorSource:
    """Returns what most readers see of a quantised tensor."""
    read = weight.read_floats
    return replace(source, dtype="F32", load=read, load_cut=read, scaled=weight)
