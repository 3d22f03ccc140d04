"""Trials of a head's weights: tensors that a conversion mixed up, and parts that do harm."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.embedding import Embedding
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..models.config import DecoderConfig
from ..models.decoder import MLP, Attention, Decoder
from ..models.drafters.base import DraftHead
from ..models.rope import RopeTables
from .trials import Change, Trial

_PRODUCTS = "q_proj", "k_proj", "v_proj", "o_proj"
_PAIRS_OF_NORMS = ("input_layernorm", "hidden_norm"), ("enorm", "hnorm")
"""Of embedding and hidden state."""


@dataclass(frozen=True)
class Ends:
    """What the target reads tokens with, and makes logits with."""

    embedding: Tensor  # [V, D]
    lm_head: Tensor | None  # [V, D]; None where it is not one whole matrix

    @classmethod
    def of(cls, target: Decoder) -> Ends:
        embedding, lm_head = target.embed_tokens.weight, getattr(target.lm_head, "weight", None)
        if lm_head is None and target.config.tie_word_embeddings:
            lm_head = embedding
        is_whole = lm_head is not None and lm_head.shape == embedding.shape
        return cls(embedding, lm_head if is_whole else None)


def end_trials(head: DraftHead, parts: nn.Module, ends: Ends | None) -> list[Trial]:
    """The target's embedding and lm_head in the place of the head's. Exporters have left these
    as they were made, at random."""
    if ends is None:
        return []
    ids = None if head.d2t is None else torch.arange(len(head.d2t)).to(head.d2t) + head.d2t
    sources = {"embed_tokens": ends.embedding, "lm_head": ends.lm_head}
    if ids is not None and ends.lm_head is not None:
        sources["lm_head"] = ends.lm_head[ids]
    trials = []
    for name, kind in (("embed_tokens", Embedding), ("lm_head", Linear)):
        source = sources[name]
        shared = head.shares_embedding if name == "embed_tokens" else head.shares_lm_head
        owners = [m for m in parts.modules() if isinstance(getattr(m, name, None), kind)]
        if shared or source is None or not owners:
            continue
        weights = [getattr(owner, name).weight for owner in owners]
        if all(weight is not None and weight.shape == source.shape for weight in weights):
            what, cure = f"{name} has wrong weights", f"put the target's {name}.weight in its place"
            if name == "lm_head" and ids is not None:
                what += ", or d2t is another's"
                cure = f"copy {name}.weight and d2t again from one source, or {cure}, at d2t's rows"
            trials.append(
                Trial(
                    f"{what}: with the target's drafts are better",
                    cure,
                    _replacing(weights, source),
                )
            )
    return trials


def _replacing(weights: list[nn.Parameter], source: Tensor) -> Change:
    def change(head: DraftHead) -> None:
        for weight in weights:
            weight.data = source.to(weight)

    return change


def norm_offset_trials(head: DraftHead, parts: nn.Module) -> list[Trial]:
    """Norms whose weights are written as their difference from 1, or not."""
    config = head.config
    is_around_0 = config.zero_centered_norms or config.decoder.norm_offset != 0

    def shift(head: DraftHead) -> None:
        for module in parts.modules():
            if isinstance(module, RMSNorm):
                module.weight.data = module.weight.data + (-1 if is_around_0 else 1)

    return [
        Trial(
            "norms are written " + ("around 1" if is_around_0 else "around 0"),
            f"{'subtract 1 from' if is_around_0 else 'add 1 to'} the weights of its norms: in "
            f"{config.format} they are {'minus 1' if is_around_0 else 'as they are'}",
            shift,
        )
    ]


def mixed_up_trials(parts: nn.Module) -> list[Trial]:
    """Tensors of one shape in each other's place, and square ones transposed: no shape tells."""
    mlps = [m for m in parts.modules() if isinstance(m, MLP)]
    attentions = [m for m in parts.modules() if isinstance(m, Attention)]
    trials = list[Trial]()
    if mlps:
        trials.append(
            Trial(
                "gate_proj and up_proj are in each other's place",
                "swap gate_proj.weight and up_proj.weight of every layer (or the halves of a fused "
                "gate_up_proj)",
                lambda head: _each(mlps, _swap_gate_and_up),
            )
        )
    if attentions:
        trials.append(
            Trial(
                "k_proj and v_proj are in each other's place",
                "swap k_proj.weight and v_proj.weight of every layer (or their rows in a fused "
                "qkv_proj)",
                lambda head: _each(attentions, _swap_keys_and_values),
            )
        )
    for one, other in _PAIRS_OF_NORMS:
        owners = [m for m in parts.modules() if hasattr(m, one) and hasattr(m, other)]
        if owners:
            trials.append(
                Trial(
                    f"{one} and {other} are in each other's place",
                    f"swap {one}.weight and {other}.weight",
                    _swapping_norms(owners, one, other),
                )
            )
    square = [name for name in _PRODUCTS if any(_is_square(a, name) for a in attentions)]
    for names in [[name] for name in square] + ([square] if len(square) > 1 else []):
        told = " and ".join(names)
        trials.append(
            Trial(
                f"{told} {'are' if len(names) > 1 else 'is'} transposed",
                f"transpose {told} of every layer, which {'are' if len(names) > 1 else 'is'} "
                "square: no shape tells",
                _transposing(attentions, names),
            )
        )
    return trials


def scale_trials(parts: nn.Module) -> list[Trial]:
    """Other scales of the products that join a head's inputs: one applied twice, or forgotten."""
    trials = list[Trial]()
    for name in ("fc", "eh_proj"):
        layers = [getattr(m, name) for m in parts.modules() if hasattr(m, name)]
        for factor, what in (
            (0.5, "too large: drafts are better with half of it"),
            (2.0, "too small: drafts are better with twice as much"),
        ):
            if layers:
                trials.append(
                    Trial(
                        f"{name} is {what}",
                        f"copy {name}.weight again from the head's source, with its scale if it "
                        "is quantised",
                        _scaling(layers, factor),
                    )
                )
    return trials


def config_trials(head: DraftHead, parts: nn.Module, target: DecoderConfig) -> list[Trial]:
    """The target's values of fields that heads take from their target, where the head's differ."""
    now, trials = head.config.decoder, []

    def use_epsilon(head: DraftHead) -> None:
        for module in parts.modules():
            if isinstance(module, RMSNorm):
                module.eps = target.rms_norm_eps

    fields = (
        ("rms_norm_eps", now.rms_norm_eps, target.rms_norm_eps, use_epsilon),
        ("head_dim", now.head_dim, target.head_dim, _use_heads_of(parts, target)),
    )
    for name, value, of_target, change in fields:
        if value != of_target and (name != "head_dim" or _fits_heads_of(parts, target)):
            trials.append(
                Trial(
                    f"{name} should be the target's, {of_target}",
                    f'"{name}": {json.dumps(of_target)} in config.json, now {json.dumps(value)}'
                    + (", and numbers of heads to match" if name == "head_dim" else ""),
                    change,
                    is_usual=True,
                )
            )
    return trials


def _fits_heads_of(parts: nn.Module, target: DecoderConfig) -> bool:
    """Whether all layers could have heads of the target's size: no tensor tells of it."""
    layers = [m for m in parts.modules() if isinstance(m, Attention)]
    return bool(layers) and all(
        layer.q_norm is None
        and layer.attention_sink_bias is None
        and layer.g_proj is None
        and layer.head_order is None
        and not any(rows % target.head_dim for rows in (_rows(layer)[1], layer.o_proj.in_features))
        for layer in layers
    )


def _use_heads_of(parts: nn.Module, target: DecoderConfig) -> Change:
    def change(head: DraftHead) -> None:
        size = target.head_dim
        for layer in parts.modules():
            if isinstance(layer, Attention):
                queries, keys, _ = _rows(layer)
                layer.num_heads = queries // size // (1 + layer.gates_output)
                layer.num_kv_heads = keys // size
                if layer.scale is not None:
                    layer.scale *= (layer.head_dim / size) ** 0.5
                layer.head_dim = size
        decoder = replace(head.config.decoder, head_dim=size)
        head.config = replace(head.config, decoder=decoder)
        now = head.rope_tables
        head.rope_tables = RopeTables(decoder, now.num_positions).to(next(now.buffers()).device)

    return change


def harmful_trials(parts: nn.Module) -> list[Trial]:
    """The head without a part of it: drafts that are better without name wrong tensors."""
    trials = []
    of_kind = ((Attention, "o_proj", "attention"), (MLP, "down_proj", "MLP"))
    for kind, last, name in of_kind:
        modules = [m for m in parts.modules() if isinstance(m, kind)]
        for i, module in enumerate(modules):
            where = f" of layer {i}" if len(modules) > 1 else ""
            trials.append(
                Trial(
                    f"the {name}{where} has wrong weights: drafts are better without it",
                    f"copy the tensors of the {name}{where}, and its norm, again from their source",
                    _without(getattr(module, last)),
                )
            )
    return trials


def _without(layer: Linear) -> Change:
    def change(head: DraftHead) -> None:
        for part in (layer.weight, layer.bias):
            if part is not None:
                part.data = torch.zeros_like(part)

    return change


def _scaling(layers: Sequence[Linear], factor: float) -> Change:
    def change(head: DraftHead) -> None:
        for layer in layers:
            assert layer.weight is not None, "the head's weights are packed"
            layer.weight.data = layer.weight.data * factor

    return change


def _swapping_norms(owners: Sequence[nn.Module], one: str, other: str) -> Change:
    def change(head: DraftHead) -> None:
        for owner in owners:
            norm, other_norm = getattr(owner, one), getattr(owner, other)
            setattr(owner, one, other_norm)
            setattr(owner, other, norm)

    return change


# -- changes of one module ---------------------------------------------------------------------
def _each(modules: Sequence[Any], change: Callable[[Any], None]) -> None:
    for module in modules:
        change(module)


def _swap_gate_and_up(mlp: MLP) -> None:
    for part in (mlp.gate_up_proj.weight, mlp.gate_up_proj.bias):
        if part is not None:
            part.data = torch.cat(part.data.chunk(2)[::-1])


def _swap_keys_and_values(attention: Attention) -> None:
    for part in (attention.qkv_proj.weight, attention.qkv_proj.bias):
        if part is not None:
            queries, keys, values = part.data.split(_rows(attention))
            part.data = torch.cat([queries, values, keys])


def _transposing(attentions: Sequence[Attention], names: Sequence[str]) -> Change:
    def change(head: DraftHead) -> None:
        for attention in attentions:
            for layer in (attention.qkv_proj, attention.o_proj):
                assert layer.weight is not None, "the head's weights are packed"
                layer.weight.data = layer.weight.data.clone()  # the head's memory stays as it is
            for name in names:
                if _is_square(attention, name):
                    product = _product(attention, name)
                    product.copy_(product.T.clone())

    return change


def _is_square(attention: Attention, name: str) -> bool:
    rows, columns = _product(attention, name).shape
    return rows == columns


def _product(attention: Attention, name: str) -> Tensor:
    """Returns the weight that a checkpoint calls so."""
    weight = (attention.o_proj if name == "o_proj" else attention.qkv_proj).weight
    assert weight is not None, "the head's weights are packed"
    if name == "o_proj":
        return weight.data
    return weight.data.split(_rows(attention))[_PRODUCTS.index(name)]


def _rows(attention: Attention) -> list[int]:
    """Returns how many rows of qkv_proj make queries, with their gates, keys and values."""
    keys = attention.num_kv_heads * attention.head_dim
    return [attention.num_q_outputs * attention.head_dim, keys, keys]
