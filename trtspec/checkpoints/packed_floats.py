"""Weights [out, in] of floats of 4 bits (e2m1), two in a byte, the first of them in its low bits.

A weight is number * scale, where neighbours share a scale. X is a module's name:

    ModelOpt's NVFP4
        X.weight               [out, in / 2]   uint8, numbers
        X.weight_scale         [out, in / 16]  e4m3
        X.weight_scale_2       one number      by which all scales are multiplied
    compressed-tensors' nvfp4-pack-quantized
        X.weight_packed, X.weight_scale        as above
        X.weight_global_scale  one number      by which all scales are divided
    compressed-tensors' mxfp4-pack-quantized
        X.weight_packed                        as above
        X.weight_scale         [out, in / 32]  uint8 s: 2^(s - 127)

Every number of e2m1 is one of e4m3, so they are FP8 weights with scales of groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..distributed.parallel import Cut
from ..errors import CheckpointError
from .mxfp4 import e4m3_of_e2m1, powers
from .packed import Names, Parts, joined, unfit
from .quantization import FP8, Packing
from .scaled import PackedTensor, as_floats
from .tensors import FLOATS, TensorSource

_BYTES = "U8"
_OF_TENSOR = {"modelopt": "weight_scale_2", "nvfp4": "weight_global_scale", "mxfp4": None}
"""What the scale of a whole tensor is called, by form."""


@dataclass(frozen=True)
class PackedFloats:
    """A weight [out, in] as the checkpoint has it."""

    how: Packing
    numbers: TensorSource
    scales: TensorSource
    of_tensor: TensorSource | None

    def read(self) -> tuple[Tensor, Tensor, float]:
        """Returns the codes [out, in] uint8, their scales [out, groups], and the tensor's: what
        they are all multiplied by.

        Raises:
            CheckpointError: a scale is NaN, infinite or below zero.
        """
        assert self.of_tensor is not None
        scales, whole = self.scales.read(), self.of_tensor.read().float().reshape(())
        whole = 1 / whole if self.how.form == "nvfp4" else whole
        values = scales.float() * whole
        if bad := int((~torch.isfinite(values) | (scales.float() < 0)).sum()):
            raise CheckpointError(
                f"{self.scales.name} in {self.scales.path} holds {bad} scales that are NaN, "
                "infinite or below zero. Copy the checkpoint again from its source."
            )
        packed = self.numbers.read()
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        return codes, scales, float(whole)

    def read_codes(self, cut: Cut | None = None) -> Tensor:
        """Returns the numbers in e4m3, [out, in] or a cut of it."""
        packed = self.numbers.read()
        codes = torch.stack((e4m3_of_e2m1(packed & 15), e4m3_of_e2m1(packed >> 4)), dim=-1)
        codes = codes.flatten(1).view(torch.float8_e4m3fn)
        return codes if cut is None else codes.narrow(cut.dim, cut.start, cut.length)

    def read_scales(self) -> Tensor:
        """Returns them, [out, groups] float32, with the tensor's; NaN where they are none."""
        if self.of_tensor is None:
            return powers(self.scales.read())
        whole = self.of_tensor.read().float().reshape(())
        scales = self.scales.read().float()
        return scales / whole if self.how.form == "nvfp4" else scales * whole


@dataclass(frozen=True)
class Nvfp4Tensor(PackedTensor):
    """An NVFP4 weight, as the checkpoint has it."""

    packed: PackedFloats

    def rows(self, start: int, length: int) -> TensorSource:
        """As of `ScaledTensor`."""
        whole = self.packed
        assert whole.of_tensor is not None
        numbers, scales = (part.rows(start, length) for part in (whole.numbers, whole.scales))
        return _weight(self.numbers.name, whole.how, numbers, [scales, whole.of_tensor])


def unpacked(
    sources: dict[str, TensorSource], how: Packing, where: Path
) -> dict[str, TensorSource]:
    """Returns the tensors of a checkpoint with its packed weights as quantised ones, `X.weight`.

    Args:
        where: its config.json, for messages.

    Raises:
        CheckpointError: scales are missing, of another shape or dtype, or of no weight, or a weight
            is there as floats too.
    """
    needed = ["weight_scale", *filter(None, [_OF_TENSOR[how.form]])]
    numbers = "weight" if how.form == "modelopt" else "weight_packed"

    def weight_of(name: str, numbers: TensorSource, parts: Parts) -> TensorSource:
        return _weight(name, how, numbers, [parts[part] for part in needed])

    return joined(sources, Names(numbers, _BYTES, needed), where, weight_of)


def _weight(
    name: str, how: Packing, numbers: TensorSource, scales: list[TensorSource]
) -> TensorSource:
    """Returns what readers see of a packed weight."""
    of_groups, of_tensor = scales[0], scales[1] if len(scales) > 1 else None
    is_matrix = len(numbers.shape) == 2 and numbers.dtype == _BYTES
    if not is_matrix or numbers.shape[1] * 2 % how.group:
        what = f"must be [outputs, inputs / 2] of {_BYTES}, of a multiple of {how.group} inputs"
        raise unfit(numbers, what)
    shape = numbers.shape[0], numbers.shape[1] * 2
    groups, dtype = (shape[0], shape[1] // how.group), _BYTES if how.form == "mxfp4" else FP8
    if of_groups.shape != groups or of_groups.dtype != dtype:
        raise unfit(of_groups, f"must be {list(groups)} of {dtype} for {numbers.name}")
    if of_tensor is not None and (math.prod(of_tensor.shape) != 1 or of_tensor.dtype not in FLOATS):
        raise unfit(of_tensor, f"must be one number of {' or '.join(FLOATS)}")
    packed = PackedFloats(how, numbers, of_groups, of_tensor)
    floats = replace(numbers, name=name, shape=shape)
    codes = replace(floats, dtype=FP8, load=packed.read_codes, load_cut=packed.read_codes)
    read = replace(of_groups, dtype="F32", load=packed.read_scales, load_cut=None)
    kind = PackedTensor if how.form == "mxfp4" else Nvfp4Tensor
    more = {} if how.form == "mxfp4" else {"packed": packed}
    return as_floats(floats, kind(codes, read, groups, (1, how.group), **more))
