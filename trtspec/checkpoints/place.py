"""Puts a checkpoint's tensors into a model's parameters, one by one.

The products of a decoder's layers, and some of a draft head's, may have FP8 weights
(`WeightForm`). Where FP8 is not kept, floats get its values: weights are the same on every device
and number of ranks, to rounding.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.base import AttentionBackend
from ..distributed.parallel import Cut
from ..errors import CheckpointError
from ..layers.experts import Experts
from ..layers.linear import Linear
from ..models.placement import Placement
from ..ops.experts import fp4
from ..ops.experts.fp4 import Fp4Weight
from ..ops.layer.four_bits import FourBitWeight
from ..ops.layer.fp8 import FP8, Fp8Weight, dequantize, has_fp8, quantize
from ..ops.layer.kv_codes import as_bytes
from .place_four_bits import (
    STACKS,
    Leaf,
    Placing,
    has_four_bits,
    leaf_of,
    place_mxfp4,
    place_packed,
    stay_mxfp4,
    stay_packed,
)
from .tensors import TensorSource

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""Columns that products of FP8 read at once. A weight whose columns these do not divide is floats;
so are experts with such groups."""
GROUP_ALIGNMENT = 32
"""The same of a `Linear`'s groups."""
GATES = "gates_proj", "shared_expert_gate"
"""Products of few outputs, each of which scales much: they are floats."""
WEIGHTS_AT_ONCE = 1 << 24
"""Weights that are quantised at once; what that takes beside the model is small."""

_Into = Tensor | Fp8Weight | Fp4Weight | FourBitWeight


@dataclass(frozen=True)
class WeightForm:
    """What the products of a decoder's layers have: each `Linear`, and experts.

    Not among them are the embeddings, the router, norms, per-layer inputs, `kv_b_proj` and the
    lm_head: these are floats. Of a draft head it is `PRODUCTS_OF_HEADS` and experts. Of a draft
    model, and where a head shares the target's, the lm_head is `lm_head_for_drafts`.
    """

    keeps_fp8: bool = False  # FP8 and MXFP4 weights stay as they are; else they become floats
    quantizes: bool = False  # float weights become FP8, or get its values where it is not kept
    is_of_head: bool = False


FLOATS_ALONE = WeightForm()
PRODUCTS_OF_HEADS = "o_proj", "gate_up_proj", "down_proj", "lm_head"
"""Of the others most read two inputs, for which there is no kernel of FP8, or make a block
drafter's context keys and values, all layers' in one product. Those of MTP layers and assistants
were not measured."""


def weight_form(quant: str | None, device: torch.device) -> WeightForm:
    """Returns the form of weights that are served: a target's, a draft model's or a head's.

    Args:
        quant: as in `EngineConfig` and in drafters' configs. None: as the checkpoint has them.
    """
    return WeightForm(keeps_fp8=has_fp8(device), quantizes=quant == "fp8")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Where and how a model's or a head's weights are kept."""

    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    kv_group: int = 0  # its first; a drafter's come after the target's
    num_positions: int | None = None  # the longest sequence; None is the (target) model's maximum
    pack: bool = True
    """On CPU, weights in the layout its kernels like. False where derivatives are wanted, or the
    weights are to be cut first (`weights.finish` packs them then)."""
    form: WeightForm = FLOATS_ALONE


def place_tensors(
    model: nn.Module,
    placement_of: Mapping[str, Placement],
    sources: Mapping[str, TensorSource],
    options: LoadOptions,
) -> None:
    """Allocates the parameters that `placement_of` names, and copies checked sources into them.

    Raises:
        CheckpointError: a file is damaged, or a quantised weight is NaN.
    """
    into: dict[Leaf, _Into] = {}
    dtype, device, form = options.dtype, options.device, options.form
    placing = Placing(model, placement_of, sources)
    of_mxfp4 = stay_mxfp4(placing) if form.keeps_fp8 else set()
    packed: dict[Leaf, int] = {}
    if form.keeps_fp8 and not form.is_of_head:
        packed = stay_packed(placing, lambda placement: _is_of_product(model, placement, form))
        packed = packed if packed and has_four_bits(dtype, device) else {}
    groups = _groups(placing, form)
    for placement in placement_of.values():
        leaf = leaf_of(placement)
        if leaf not in into and leaf not in packed:
            shape = placing.shape_of(leaf)
            if leaf[0] in of_mxfp4 and leaf[1] in STACKS:
                into[leaf] = fp4.empty(shape, device)
            elif leaf in groups:
                into[leaf] = _empty_fp8(shape, groups[leaf], device)
            else:
                into[leaf] = torch.empty(shape, dtype=placement.dtype or dtype, device=device)
    for name, placement in placement_of.items():
        if placement.is_elsewhere:
            continue
        leaf = leaf_of(placement)
        if leaf in packed:
            continue
        to = into[leaf]
        if placement.expert is not None:
            to = _each(to, itemgetter(placement.expert))
        if placement.cut is not None and placement.module.endswith("lm_head"):
            _zero_from(to, placement.shape[placement.dim])
        if isinstance(to, Fp4Weight):
            place_mxfp4(to, sources[name], placement)
        elif leaf in groups or (form.quantizes and _is_of_product(model, placement, form)):
            _place_product(to, sources[name], placement, device)
        else:
            assert isinstance(to, Tensor)
            _place_floats(to, sources[name], placement)
    into.update(place_packed(placing, packed, device))
    _hold(model, into)


def lm_head_for_drafts(lm_head: Any, form: WeightForm) -> Any:
    """Returns what a drafter of this form chooses by: a model's lm_head, or an FP8 copy of it.

    It is the model's own where FP8 is not kept, and where 16 does not divide its sizes.

    Raises:
        CheckpointError: a weight is NaN or infinite.
    """
    if not (form.keeps_fp8 and form.quantizes and isinstance(lm_head, Linear)):
        return lm_head
    weight, shard = lm_head.weight, lm_head.shard
    if weight is None or lm_head.bias is not None or any(n % ALIGNMENT for n in weight.shape):
        return lm_head
    with torch.device("meta"):
        copy = Linear(lm_head.in_features, lm_head.out_features, bias=False, shard=shard)
    to = _empty_fp8(weight.shape, lm_head.in_features, weight.device)
    _quantize_into(to, weight.data, weight.device, "The model's lm_head")
    copy.hold_fp8(to)
    return copy


def _each(into: _Into, take: Callable[[Tensor], Tensor]) -> _Into:
    """Returns a part of a parameter: of FP8 ones, of codes and scales."""
    if isinstance(into, Fp8Weight):
        return Fp8Weight(take(into.codes), take(into.scales), into.group)
    assert isinstance(into, Tensor)
    return take(into)


def _zero_from(into: _Into, row: int) -> None:
    """Zeroes the rows of no token, in which the last rank's lm_head may end."""
    _each(into, lambda t: as_bytes(t[row:]).zero_())


def _empty_fp8(shape: torch.Size, group: int, device: torch.device) -> Fp8Weight:
    *stack, columns = shape
    return Fp8Weight(
        codes=torch.empty(shape, dtype=FP8, device=device),
        scales=torch.empty((*stack, -(-columns // group)), device=device, dtype=torch.float32),
        group=group,
    )


def _place_floats(to: Tensor, source: TensorSource, placement: Placement) -> None:
    tensor = source.read(placement.cut)
    if placement.offset:
        tensor = tensor.float() + placement.offset
    length = placement.shape[placement.dim]
    to.narrow(placement.dim, placement.start, length).copy_(placement.arranged(tensor))


# -- FP8 -------------------------------------------------------------------------------------------
def _groups(placing: Placing, form: WeightForm) -> dict[Leaf, int]:
    """Returns the columns that share a scale, for each parameter that is FP8."""
    if not form.keeps_fp8:
        return {}
    parts: dict[Leaf, list[tuple[TensorSource, Placement]]] = defaultdict(list)
    for name, placement in placing.placement_of.items():
        if _is_of_product(placing.model, placement, form):
            parts[leaf_of(placement)].append((placing.sources[name], placement))
    found = {
        leaf: _group(of_leaf, isinstance(placing.model.get_submodule(leaf[0]), Experts), form)
        for leaf, of_leaf in parts.items()
    }
    floats = {module for (module, _), group in found.items() if group is None}
    # Of experts, both products are FP8 or none.
    return {leaf: group for leaf, group in found.items() if group and leaf[0] not in floats}


def _is_of_product(model: nn.Module, placement: Placement, form: WeightForm) -> bool:
    """Whether a tensor is of a product that the form is about."""
    name, module = placement.module, model.get_submodule(placement.module)
    if isinstance(module, Experts):
        return name.startswith("layers.") and placement.leaf in STACKS
    if not isinstance(module, Linear) or placement.leaf != "weight":
        return False
    if form.is_of_head:
        return name.rpartition(".")[2] in PRODUCTS_OF_HEADS
    if name.endswith(GATES):
        return False
    return name.startswith("layers.") and ".per_layer." not in name


def _group(
    parts: list[tuple[TensorSource, Placement]], of_experts: bool, form: WeightForm
) -> int | None:
    """Returns the columns that share a scale in a parameter of these parts; None: floats."""
    columns = parts[0][1].shape[-1]
    narrower = set()
    for source, placement in parts:
        if source.scaled is not None and source.scaled.is_fp8:
            narrower.add(source.scaled.group(placement.cut))
        elif not form.quantizes:
            return None
    narrower.discard(columns)
    group = min(narrower, default=columns)
    if len(narrower) > 1 or columns % ALIGNMENT:
        return None
    is_read = group == columns or group % (ALIGNMENT if of_experts else GROUP_ALIGNMENT) == 0
    return group if is_read else None


def _place_product(
    to: _Into, source: TensorSource, placement: Placement, device: torch.device
) -> None:
    """Puts FP8 weights, or their values, where they belong."""
    length = placement.shape[placement.dim]
    to = _each(to, lambda t: t.narrow(placement.dim, placement.start, length))
    scaled = source.scaled
    if scaled is not None and scaled.is_fp8:
        weight = scaled.read(placement.cut)
        codes = placement.arranged(as_bytes(weight.codes)).view(weight.codes.dtype)
        _copy(to, Fp8Weight(codes, placement.arranged(weight.scales), weight.group))
        return
    cut = placement.cut
    cuts_columns = cut is not None and cut.dim == len(source.shape) - 1
    # A row's scale is of the whole row: the model is the same over any number of ranks.
    tensor = placement.arranged(source.read(None if cuts_columns else cut))
    columns = cut if cuts_columns else None
    _quantize_into(to, tensor, device, f"{source.name} in {source.path}", columns)


def _quantize_into(
    to: _Into, weight: Tensor, device: torch.device, name: str, columns: Cut | None = None
) -> None:
    """Puts float weights, or the given columns of them, where they belong, as FP8 or its values.

    Args:
        name: of the weight, for people.
    """
    for rows in _rows_at_once(weight.shape):
        part = weight[rows].to(device)
        if not bool(torch.isfinite(part).all()):
            raise CheckpointError(
                f"{name} holds weights that are NaN or infinite, which FP8 has not. Copy the "
                "checkpoint again from its source, or leave quant out."
            )
        quantized = quantize(part)
        if columns is not None:
            codes = quantized.codes.narrow(1, columns.start, columns.length)
            quantized = Fp8Weight(codes, quantized.scales, columns.length)
        _copy(_each(to, itemgetter(rows)), quantized)


def _rows_at_once(shape: torch.Size) -> Iterator[tuple[int | slice, ...]]:
    """Yields indices of a few rows at a time, of a matrix or of each one in a stack."""
    *stack, rows, columns = shape
    count = max(1, WEIGHTS_AT_ONCE // columns)
    for matrix in product(*map(range, stack)):
        for start in range(0, rows, count):
            yield (*matrix, slice(start, start + count))


def _copy(to: _Into, weight: Fp8Weight) -> None:
    """Copies codes, and scales: one for a row becomes one for each of its groups."""
    if isinstance(to, Fp8Weight):
        as_bytes(to.codes).copy_(as_bytes(weight.codes))
        to.scales.copy_(weight.scales)
    else:
        assert isinstance(to, Tensor)
        to.copy_(dequantize(weight, to.dtype))


# -- the model's parameters ---------------------------------------------------------------------
def _hold(model: nn.Module, into: Mapping[Leaf, _Into]) -> None:
    """Makes the model's parameters of what was filled."""
    for (name, leaf), tensors in into.items():
        module = model.get_submodule(name)
        if isinstance(tensors, Tensor):
            setattr(module, leaf, nn.Parameter(tensors, requires_grad=False))
        elif isinstance(tensors, FourBitWeight) and isinstance(module, Linear):
            module.hold_four_bits(tensors)
        elif isinstance(module, Linear):
            assert isinstance(tensors, Fp8Weight)
            module.hold_fp8(tensors)
        elif isinstance(module, Experts) and leaf == "gate_up_proj":
            down = into[name, "down_proj"]
            assert not isinstance(down, Tensor)
            module.hold(tensors, down)
    for kind, name in ((Fp8Weight, "FP8"), (Fp4Weight, "MXFP4"), (FourBitWeight, "4-bit")):
        kept = [weight for weight in into.values() if isinstance(weight, kind)]
        if kept:
            size = sum(t.nbytes for weight in kept for t in weight if isinstance(t, Tensor))
            logger.info("%d matrices have %s weights: %.2f GiB.", len(kept), name, size / 2**30)
