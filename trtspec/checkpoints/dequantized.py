"""Quantised weights: a weight is its number times its scale.

    scales of        shape                                     for a weight [out, in]
    the tensor       [] or [1]
    its rows         [out] or [out, 1]
    its blocks       [ceil(out / bo), ceil(in / bi)], perhaps with a 1 after each

Stacks of experts [E, out, in] have one more dimension in front (Step-3.5). Tensors of another dtype
are what they say. Scales and zero points of activations are left out: here these stay in the
model's dtype. Scales of the KV cache are read in `kv_scales.py`.

To most readers such a tensor is a float32 one. A product may keep the numbers: they are in
`TensorSource.scaled`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.parallel import Cut
from ..errors import CheckpointError
from ..ops.layer.fp8 import Fp8Weight, dequantize
from .quantization import FP8, Quantization, quantization_fields, quantization_of
from .tensors import FLOATS, TensorSource

_OF_SERVING = re.compile(
    r"\.(q|k|v|kv)_scale$|\.(input|activation|output)_(scale|zero_point)$"
    r"|_proj_(input|activation)_scale$"  # of a stack of experts
)
"""Scales and zero points of what is no weight."""


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
        columns = self.numbers.shape[-1]
        is_cut = cut is not None and cut.dim == len(self.numbers.shape) - 1
        if cut is not None and is_cut:
            columns = cut.length
        if self.block is None:
            return columns
        group = math.gcd(self.block[1], columns) if is_cut else self.block[1]
        return min(group, columns)

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
        elif cut is not None and self.block is not None:
            first = torch.arange(cut.start, cut.start + cut.length, group)
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


def dequantized(
    sources: dict[str, TensorSource], raw: dict[str, Any], where: Path
) -> dict[str, TensorSource]:
    """The tensors of a checkpoint with its quantised weights as float32 ones, without scales.

    Args:
        raw: config.json, as in `quantization_of`. where: its path, for messages.

    Raises:
        CheckpointError: a scale is missing, of another shape or dtype, or of no weight.
    """
    how = quantization_of(raw, where)
    if not quantization_fields(raw, where)[0]:
        return sources
    found = {name: s for name, s in sources.items() if not _OF_SERVING.search(name)}
    if how is None:
        return found
    for name, source in list(found.items()):
        if source.dtype == how.dtype:
            names = [f"{name}{suffix}" for suffix in how.suffixes]
            scales = [found.pop(scale) for scale in names if scale in found]
            if len(scales) > 1:
                raise CheckpointError(
                    f"{where.parent} holds {names[0]} and {names[1]}; a weight has one of them. "
                    "Remove the one that is not its scale, or copy the checkpoint again from its "
                    "source."
                )
            found[name] = _dequantized(source, scales[0] if scales else None, how)
    of_weights = tuple(f".weight{suffix}" for suffix in how.suffixes)
    left = [name for name in found if name.endswith(of_weights)]
    if left:
        name = left[0].removesuffix("_inv").removesuffix("_scale")
        kind = f"has dtype {sources[name].dtype}" if name in sources else "is not there"
        raise CheckpointError(
            f"{where.parent} holds {left[0]}, but {name} {kind}; it must be {how.dtype}. Copy the "
            "checkpoint again from its source."
        )
    return found


def _dequantized(
    source: TensorSource, scale: TensorSource | None, how: Quantization
) -> TensorSource:
    if scale is None:
        raise CheckpointError(
            f"{source.name} in {source.path} is {how.dtype}, but there is no "
            f"{source.name}{how.suffixes[0]}. Copy the checkpoint again from its source, all "
            "shards of it."
        )
    if len(source.shape) not in (2, 3):
        raise CheckpointError(
            f"{source.name} in {source.path} is {how.dtype} of shape {list(source.shape)}; only "
            "matrices and stacks of them may be. Copy the checkpoint again from its source."
        )
    shape = _shape_of_scales(source.shape, scale.shape, how)
    if shape is None or scale.dtype not in FLOATS:
        raise CheckpointError(
            f"{scale.name} in {scale.path} has shape {list(scale.shape)} and dtype {scale.dtype}; "
            f"for a weight of {list(source.shape)} it must be {_allowed(source.shape, how)} of "
            f"{', '.join(FLOATS)}. Check quantization_config in config.json, or copy the "
            "checkpoint again."
        )
    block = how.block
    if block is not None:  # one that is larger than the weight
        block = min(block[0], source.shape[-2]), min(block[1], source.shape[-1])
    scaled = ScaledTensor(source, scale, shape, block)
    return replace(
        source, dtype="F32", load=scaled.read_floats, load_cut=scaled.read_floats, scaled=scaled
    )


def _shape_of_scales(
    weight: tuple[int, ...], scale: tuple[int, ...], how: Quantization
) -> tuple[int, ...] | None:
    """Returns the scales' shape with as many dimensions as the weight's; None if none fits."""
    *stack, rows, columns = weight
    if how.block is not None:
        of_blocks = (*stack, -(-rows // how.block[0]), -(-columns // how.block[1]))
        spread = (*stack, of_blocks[-2], 1, of_blocks[-1], 1)
        return of_blocks if scale in (of_blocks, spread) else None
    if math.prod(scale) == math.prod(stack) and len(scale) <= len(weight):
        return (*stack, 1, 1)
    if scale in ((*stack, rows), (*stack, rows, 1)):
        return (*stack, rows, 1)
    return None


def _allowed(weight: tuple[int, ...], how: Quantization) -> str:
    *stack, rows, columns = weight
    if how.block is not None:
        return str([*stack, -(-rows // how.block[0]), -(-columns // how.block[1])])
    return " or ".join(str([*stack, *shape]) for shape in ((), (1,), (rows,), (rows, 1)))
