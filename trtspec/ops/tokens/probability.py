"""How likely a drafter finds the token that it likes best: what verification is shared out by."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.dispatch import twin
from .markov_walk import MarkovTables


@twin("tokens.triton_probability")
def best_probabilities(logits: Tensor) -> Tensor:
    """Returns the probability of each row's best token, in 0 … 1: [R, Vd] -> [R] float32.

    A NaN counts as -inf. A row of nothing else has 0.
    """
    scores = logits.float()
    scores = scores.masked_fill(scores.isnan(), float("-inf"))
    best = scores.amax(-1, keepdim=True)
    probability = 1 / (scores - best).exp().sum(-1)
    return probability.nan_to_num(0.0)


def walk_probabilities(
    logits: Tensor, before: Tensor, taken: Tensor, tables: MarkovTables
) -> Tensor:
    """Returns the probability of each draft of `walk_markov`, [P, B] float32.

    Args:
        logits, before, tables: as it was called with; the logits are changed.
        taken: [P, B] int32, as it returned them.
    """
    known = torch.cat([before[None].to(taken.dtype), taken[:-1]]).flatten()
    rows = tables.w1[known.to(torch.int64).clamp(0, tables.w1.shape[0] - 1)]
    biased = logits.addmm_(rows, tables.w2.T)
    return best_probabilities(biased).view(taken.shape)
