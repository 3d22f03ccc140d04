"""Trials of what a head's layers make queries and keys with: rows and norms that were converted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..layers.norm import RMSNorm
from ..models.decoder import Attention
from ..models.drafters.base import DraftHead
from ..models.drafters.dflash import DFlashHead
from .trials import Change, Trial

LIKE_TRAINED = 1.5
"""About what trained norms of queries and keys weigh; in the package's DSpark head 1.3 to 1.55."""
_NORMS = "q_norm", "k_norm"


def layout_trials(parts: nn.Module) -> list[Trial]:
    """Rows of queries and keys in another order; none of layers that rotate a part of a head."""
    layers = _layers(parts)
    if not layers or any(layer.head_order is not None for layer in layers):
        return []

    def reorder(order_of: Callable[[Tensor], Tensor]) -> Change:
        def change(head: DraftHead) -> None:
            for layer in layers:
                _reorder(layer, order_of(torch.arange(layer.head_dim)))

        return change

    return [
        Trial(
            "q_proj and k_proj are laid out for a RoPE that rotates neighbours",
            "in each head of q_proj and k_proj write the even rows, then the odd ones",
            reorder(lambda rows: rows.view(-1, 2).T.flatten()),
        ),
        Trial(
            "q_proj and k_proj were laid out for a RoPE of halves twice",
            "in each head of q_proj and k_proj write a row of the first half and one of the "
            "second by turns",
            reorder(lambda rows: rows.view(2, -1).T.flatten()),
        ),
    ]


def norm_trials(head: DraftHead, parts: nn.Module) -> list[Trial]:
    """Norms of queries and keys like trained ones, where a head's were lost."""
    lost, layers = lost_norms(head, parts), _layers(parts)
    if lost is None:
        return []

    def restore(head: DraftHead) -> None:
        for layer in layers:
            weight = layer.qkv_proj.weight
            assert weight is not None, "the head's weights are packed"
            for name in _NORMS:
                if getattr(layer, name) is None:
                    setattr(layer, name, RMSNorm(layer.head_dim, head.config.decoder.rms_norm_eps))
                norm = getattr(layer, name)
                norm.weight.data = weight.new_full((layer.head_dim,), LIKE_TRAINED - norm.offset)

    return [
        Trial(
            f"q_norm and k_norm are lost: with weights of {LIKE_TRAINED:g} drafts are better",
            "copy q_norm.weight and k_norm.weight of every layer again from the head's source: "
            f"{lost}",
            restore,
        )
    ]


def lost_norms(head: DraftHead, parts: nn.Module) -> str | None:
    """Says what is odd about the norms of queries and keys, None if nothing is."""
    layers = _layers(parts)
    norms = [norm for layer in layers for norm in (layer.q_norm, layer.k_norm) if norm is not None]
    if layers and not norms and isinstance(head, DFlashHead):
        return "the head has none, and most block heads have"
    others = [m for m in parts.modules() if isinstance(m, RMSNorm) and m not in norms]
    if norms and all(map(_is_untrained, norms)) and not all(map(_is_untrained, others)):
        return "they are 1 everywhere, and the head's other norms are not"
    return None


def _is_untrained(norm: RMSNorm) -> bool:
    return bool((norm.weight + norm.offset == 1).all())


def _layers(parts: nn.Module) -> list[Attention]:
    return [module for module in parts.modules() if isinstance(module, Attention)]


def _reorder(layer: Attention, order: Tensor) -> None:
    """order: of the rows of each head of queries and keys."""
    gates = (layer.num_q_outputs - layer.num_heads) * layer.head_dim  # before the queries
    starts = gates + torch.arange(layer.num_heads + layer.num_kv_heads) * layer.head_dim
    rows = (starts[:, None] + order).flatten()
    for part in (layer.qkv_proj.weight, layer.qkv_proj.bias):
        if part is not None:
            there, end = rows.to(part.device), gates + len(rows)
            part.data = torch.cat([part.data[:gates], part.data[there], part.data[end:]])
