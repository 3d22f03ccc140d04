"""MXFP4 weights (OCP Microscaling Formats 1.0): 32 numbers of 4 bits (e2m1) share a power of two.

    X_blocks [E, out, in / 32, 16] uint8: two numbers a byte, the first of them in its low bits
    X_scales [E, out, in / 32]     uint8: 2^(s - 127); 255 is NaN, from 253 on 6 is too large

So gpt-oss stores the experts' stacks X. Products may keep them (`read_fp4`). Every number of e2m1
is one of e4m3 too: else they are FP8 weights whose groups have 32 columns, with the same values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..distributed.parallel import Cut
from ..errors import CheckpointError
from ..ops.experts import fp4
from .quantization import FP8, MXFP4
from .scaled import ScaledTensor, as_floats
from .tensors import TensorSource

_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4Tensor(ScaledTensor):
    """A stack of MXFP4 weights, as the checkpoint has it."""

    blocks: TensorSource
    scale_bytes: TensorSource

    def fits_fp4(self, cut: Cut | None) -> bool:
        """Whether a cut can be `Fp4Weight`: blocks are whole, and kernels take the scales."""
        rows, columns = self.numbers.shape[1:]
        edges = (0, columns) if cut is None or cut.dim < 2 else (cut.start, cut.length)
        rows = rows if cut is None or cut.dim != 1 else cut.length
        whole_blocks = rows % fp4.ROWS == 0 and all(edge % fp4.BLOCK == 0 for edge in edges)
        return whole_blocks and int(self.scale_bytes.read().max()) <= fp4.LARGEST_SCALE

    def read_fp4(self, cut: Cut | None) -> tuple[Tensor, Tensor]:
        """Returns the blocks and scales of what `fits_fp4`."""
        of_groups = cut
        if cut is not None and cut.dim == 2:
            of_groups = Cut(2, *(n // fp4.GROUP for n in cut[1:]))
        return self.blocks.read(of_groups), self.scale_bytes.read(of_groups)


def unpacked(sources: dict[str, TensorSource], where: Path) -> dict[str, TensorSource]:
    """Returns the tensors of a checkpoint with its MXFP4 weights as quantised ones, by their names
    X.

    Args:
        where: its config.json, for messages.

    Raises:
        CheckpointError: blocks without scales, scales without blocks, ones of other shapes or
            dtypes, or beside the weight as floats.
    """
    found = dict(sources)
    for name in [name for name in sources if name.endswith(_BLOCKS)]:
        stem = name.removesuffix(_BLOCKS)
        blocks, scales = found.pop(name), found.pop(f"{stem}{_SCALES}", None)
        if scales is None:
            raise CheckpointError(
                f"{where.parent} holds {name}, but not {stem}{_SCALES}. Copy the checkpoint again "
                "from its source, all shards of it."
            )
        if stem in found:
            raise CheckpointError(
                f"{where.parent} holds {stem} and {name}, which are one weight. Remove one of "
                "them, or copy the checkpoint again from its source."
            )
        found[stem] = _weight(stem, blocks, scales)
    left = next((name for name in found if name.endswith(_SCALES)), None)
    if left is not None:
        raise CheckpointError(
            f"{where.parent} holds {left}, but not {left.removesuffix(_SCALES)}{_BLOCKS}. Copy the "
            "checkpoint again from its source, all shards of it."
        )
    return found


def _weight(stem: str, blocks: TensorSource, scales: TensorSource) -> TensorSource:
    of_groups = blocks.shape[:-1]
    is_whole = len(blocks.shape) == 4 and blocks.shape[-1] == fp4.GROUP // 2
    if not is_whole or scales.shape != of_groups or {blocks.dtype, scales.dtype} != {MXFP4}:
        raise CheckpointError(
            f"{blocks.name} in {blocks.path} has shape {list(blocks.shape)} and dtype "
            f"{blocks.dtype}, {scales.name} {list(scales.shape)} and {scales.dtype}; only experts' "
            f"stacks may be MXFP4, of [experts, outputs, groups, {fp4.GROUP // 2}] and [experts, "
            f"outputs, groups] of {MXFP4}. Use another checkpoint, or copy it again."
        )
    shape = (*of_groups[:-1], of_groups[-1] * fp4.GROUP)
    read = partial(_codes, blocks)
    codes = replace(blocks, shape=shape, dtype=FP8, load=read, load_cut=read)
    powers = replace(scales, dtype="F32", load=partial(_powers, scales), load_cut=None)
    block = 1, fp4.GROUP
    weight = Mxfp4Tensor(codes, powers, of_groups, block, blocks=blocks, scale_bytes=scales)
    return as_floats(replace(blocks, name=stem, shape=shape), weight)


def _codes(blocks: TensorSource, cut: Cut | None = None) -> Tensor:
    """Returns the numbers in e4m3, [E, out, in] or a cut of it."""
    whole_groups = cut
    if cut is not None and cut.dim == 2:
        first, end = cut.start // fp4.GROUP, -(-(cut.start + cut.length) // fp4.GROUP)
        whole_groups = Cut(2, first, end - first, cut.full // fp4.GROUP)
    packed = blocks.read(whole_groups)
    codes = torch.stack((e4m3_of_e2m1(packed & 15), e4m3_of_e2m1(packed >> 4)), dim=-1)
    codes = codes.flatten(-3).view(torch.float8_e4m3fn)
    if cut is None or cut.dim != 2:
        return codes
    return codes.narrow(2, cut.start % fp4.GROUP, cut.length)


def e4m3_of_e2m1(codes: Tensor) -> Tensor:
    """Returns the e4m3 codes of e2m1 ones, both uint8; a half has another mantissa bit."""
    size = codes & 7
    return torch.where(size > 1, 0x30 + 4 * size, 0x30 * size) | (codes & 8) << 4


def _powers(scales: TensorSource) -> Tensor:
    return powers(scales.read())


def powers(codes: Tensor) -> Tensor:
    """Returns 2^(s - 127) of e8m0 codes s; NaN, which is refused, where 6 times it is infinite."""
    exponents = codes.int() - 127
    scales = torch.ldexp(torch.ones(exponents.shape), exponents)
    return torch.where(exponents > 125, torch.nan, scales)
