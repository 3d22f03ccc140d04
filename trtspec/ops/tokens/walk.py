"""One path through each draft's few best tokens, chosen by the token before.

    score of token b behind token a = unary(b) + <A[a] * h, B[b]>

h is made of the row that proposes; A and B have a row for every token. The path begins behind the
last known token. Source: DFlash2 (z-lab), https://github.com/z-lab/dflash.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch.dispatch import twin


class PathCandidates(NamedTuple):
    """Candidates of P drafts of B requests, C of each."""

    ids: Tensor  # [P, B, C] int64
    unary: Tensor  # [P, B, C], their logits
    states: Tensor  # [P, B, r]


class Codebooks(NamedTuple):
    """What stands for a token in a score."""

    predecessors: Tensor  # [V, r], A
    successors: Tensor  # [V, r], B


def candidate_scores(of_draft: PathCandidates, before: Tensor, books: Codebooks) -> Tensor:
    """Returns the scores of one draft's candidates, [B, C], float32 or wider; NaN is -inf.

    Args:
        of_draft: ids and unary [B, C], states [B, r].
        before: [B] int, the tokens before.
    """
    wide = torch.promote_types(of_draft.unary.dtype, torch.float32)
    known = before.to(torch.int64).clamp(0, books.predecessors.shape[0] - 1)
    context = books.predecessors[known].to(wide) * of_draft.states.to(wide)
    products = context[:, None] * books.successors[of_draft.ids].to(wide)
    scores = of_draft.unary.to(wide) + products.sum(-1)
    return scores.masked_fill(scores.isnan(), float("-inf"))


@twin("tokens.triton_walk")
def walk_candidates(candidates: PathCandidates, before: Tensor, books: Codebooks) -> Tensor:
    """Takes the best candidate behind the one just taken, draft after draft: [P, B] int32.

    Args:
        before: [B] int, the last known tokens.
    """
    taken: list[Tensor] = []
    for of_draft in zip(*candidates, strict=True):
        given = PathCandidates(*of_draft)
        best = candidate_scores(given, before, books).argmax(-1, keepdim=True)
        before = given.ids.gather(1, best)[:, 0].to(torch.int32)
        taken.append(before)
    return torch.stack(taken)
