"""Weights of 4 bits: which of them stay so, and how they get into a model's parameters."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from .. import native
from ..distributed.parallel import Cut
from ..models.placement import Placement
from ..ops.experts import fp4
from ..ops.experts.fp4 import Fp4Weight
from ..ops.layer import four_bits
from ..ops.layer.four_bits import FourBitWeight
from .four_bit_parts import FourBitParts, packed_group
from .mxfp4 import Mxfp4Tensor
from .packed_floats import Nvfp4Tensor
from .packed_ints import Int4Tensor
from .scaled import PackedTensor
from .tensors import TensorSource

logger = logging.getLogger(__name__)

STACKS = "gate_up_proj", "down_proj"  # of experts
Leaf = tuple[str, str]
"""The names of a module and of its parameter."""


def leaf_of(placement: Placement) -> Leaf:
    """Returns where a tensor goes."""
    return placement.module, placement.leaf


@dataclass(frozen=True)
class Placing:
    """A model, and what goes into it; of both mappings a key is a tensor's name."""

    model: nn.Module
    placement_of: Mapping[str, Placement]
    sources: Mapping[str, TensorSource]

    def shape_of(self, leaf: Leaf) -> torch.Size:
        """Returns a parameter's shape."""
        parameter: torch.Tensor = getattr(self.model.get_submodule(leaf[0]), leaf[1])
        return parameter.shape


# -- MXFP4 -----------------------------------------------------------------------------------------
def stay_mxfp4(placing: Placing) -> set[str]:
    """Returns the names of the experts' modules both of whose stacks stay MXFP4."""
    fits: dict[str, bool] = {}
    are_stored: set[str] = set()  # modules with MXFP4 in the checkpoint
    for name, placement in placing.placement_of.items():
        if placement.leaf in STACKS:
            scaled = placing.sources[name].scaled
            fit = isinstance(scaled, Mxfp4Tensor) and scaled.fits_fp4(placement.cut)
            fits[placement.module] = fit and fits.get(placement.module, True)
            are_stored.update([placement.module] if isinstance(scaled, Mxfp4Tensor) else [])
    kept = {module for module, fit in fits.items() if fit}
    if are_stored - kept:
        logger.warning(
            "%d of %d mixtures do not stay MXFP4: this rank's part of an expert's width is no "
            "multiple of %d, or a scale is too large. They take 2 to 4 times the memory. Share "
            "experts out in place of their width (moe_expert_parallel_size).",
            len(are_stored - kept),
            len(are_stored),
            fp4.BLOCK,
        )
    return kept


_EXPERTS_AT_ONCE = 4


def place_mxfp4(to: Fp4Weight, source: TensorSource, placement: Placement) -> None:
    """Puts a stack of MXFP4, or this rank's part of it, where it belongs."""
    assert isinstance(source.scaled, Mxfp4Tensor)
    experts = placement.experts or Cut(0, 0, len(to.codes), len(to.codes))
    parts = [part.narrow(0, *experts[1:3]) for part in source.scaled.read_fp4(placement.cut)]
    of_rows = replace(placement, experts=None)
    # Put in order on the device, where that takes five times a few experts' memory.
    for first in range(0, len(to.codes), _EXPERTS_AT_ONCE):
        few = slice(first, first + _EXPERTS_AT_ONCE)
        blocks, scales = (of_rows.arranged(part[few].to(to.codes.device)) for part in parts)
        for part, tensor in zip(to, fp4.from_checkpoint(blocks, scales), strict=True):
            part[few].copy_(tensor)


# -- INT4 and NVFP4 --------------------------------------------------------------------------------
def stay_packed(placing: Placing, is_product: Callable[[Placement], bool]) -> dict[Leaf, int]:
    """Returns the parameters that kernels read as INT4 or NVFP4, and the columns that share a
    scale.

    Args:
        is_product: whether a tensor is of a product that may be one.
    """
    parts: dict[Leaf, list[int | None]] = defaultdict(list)
    mixtures: set[str] = set()  # with 4 bits in the checkpoint
    for name, placement in placing.placement_of.items():
        source, group = placing.sources[name], None
        if isinstance(source.scaled, Int4Tensor | Nvfp4Tensor) and is_product(placement):
            group = packed_group(source, placement)
        parts[leaf_of(placement)].append(group)
        if isinstance(source.scaled, PackedTensor) and placement.leaf in STACKS:
            mixtures.add(placement.module)
    found = {
        leaf: groups[0]
        for leaf, groups in parts.items()
        if groups[0] is not None and len(set(groups)) == 1 and _is_whole(placing.shape_of(leaf))
    }
    others = {name for name in mixtures if any((name, leaf) not in found for leaf in STACKS)}
    if others:
        logger.warning(
            "The experts of %d of %d mixtures do not stay 4 bits: they become FP8 with scales of "
            "groups, or floats. Kernels read INT4 and NVFP4 where all of a mixture is of one form, "
            "scales of integers have 16 bits, and %d divides a rank's inputs and %d its outputs. "
            "(moe_expert_parallel_size leaves experts whole.)",
            len(others),
            len(mixtures),
            four_bits.STEP,
            2 * four_bits.ROWS,
        )
    return {leaf: group for leaf, group in found.items() if leaf[0] not in others}


def _is_whole(shape: torch.Size) -> bool:
    """Whether records divide a weight."""
    out, columns = shape[-2:]
    return out % (2 * four_bits.ROWS) == 0 and columns % four_bits.STEP == 0


def has_four_bits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for weights of 4 bits; warns if they are for another dtype."""
    if native.kernels(torch.empty(0, device=device)) is None:
        return False
    if dtype != torch.bfloat16:
        logger.warning(
            "The checkpoint's 4-bit weights stay so with dtype='bfloat16' alone. In %s INT4 takes "
            "twice the memory, NVFP4 four times, and steps take longer.",
            dtype,
        )
    return dtype == torch.bfloat16


def place_packed(
    placing: Placing, groups: Mapping[Leaf, int], device: torch.device
) -> dict[Leaf, FourBitWeight]:
    """Returns parameters of INT4 and NVFP4, put together one matrix after the other: each takes
    more for a while.

    Args:
        groups: as `stay_packed` returns them.

    Raises:
        CheckpointError: a file is damaged, or a scale is NaN or infinite.
    """
    names_of: dict[tuple[Leaf, int | None], list[str]] = defaultdict(list)
    for name, placement in placing.placement_of.items():
        if leaf_of(placement) in groups and not placement.is_elsewhere:
            names_of[leaf_of(placement), placement.expert].append(name)
    into: dict[Leaf, FourBitWeight] = {}
    for (leaf, expert), names in names_of.items():
        shape = placing.shape_of(leaf)
        parts = FourBitParts(shape[-2:], groups[leaf], device)
        for name in names:
            parts.place(placing.sources[name], placing.placement_of[name])
        weight = parts.packed()
        if expert is None:
            into[leaf] = weight
            continue
        if leaf not in into:
            into[leaf] = four_bits.empty(shape, groups[leaf], device)
        for to, part in zip(into[leaf].at(expert), weight, strict=True):
            if to is not None and part is not None:
                to.copy_(part)
    return into
