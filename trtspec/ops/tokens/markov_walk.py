"""Drafts of a block chosen in turn, the logits of each biased by the token before it (DSpark).

    logits of the draft behind token a = own logits + W2 W1[a]

Bias and sum are rounded to the logits' dtype, as where they are made one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.dispatch import twin
from .sample import greedy_tokens


class MarkovTables(NamedTuple):
    """A bias of low rank r, and what a draft stands for."""

    w1: Tensor  # [V, r], by the token before
    w2: Tensor  # [Vd, r], by the draft
    d2t: Tensor | None  # [Vd] int64 offsets, target id = draft id + d2t[draft id]


@twin("tokens.triton_markov_walk")
def walk_markov(logits: Tensor, before: Tensor, tables: MarkovTables) -> Tensor:
    """Takes the best draft behind the one just taken: [P, B] int32, target ids.

    A NaN is never taken, and of equals the first is.

    Args:
        logits: [P * B, Vd], by draft and then by request, each row contiguous.
        before: [B] int, the last known tokens.
    """
    batch = before.shape[0]
    taken: list[Tensor] = []
    for own in logits.split(batch):
        known = before.to(torch.int64).clamp(0, tables.w1.shape[0] - 1)
        biased = own + torch.nn.functional.linear(tables.w1[known], tables.w2)
        before = greedy_tokens(biased.masked_fill(biased.isnan(), float("-inf")))
        if tables.d2t is not None:
            before = (before + tables.d2t[before.to(torch.int64)]).to(torch.int32)
        taken.append(before)
    return torch.stack(taken)
