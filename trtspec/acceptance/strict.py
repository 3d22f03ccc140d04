"""Accepts drafts while each is exactly the target's choice.

This is lossless for greedy requests. For sampled ones the target's token is drawn first, and a
draft must match it. That is lossless too: the output is the target's sample, whatever was drafted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.tokens.accept import count_accepted
from ..ops.tokens.greedy import Accepted
from .rule import Candidates, Drawn, Judged, Rule, greedy_kernel, sampled_kernel
from .target import sample_target_tokens


@dataclass(frozen=True)
class Match(Rule):
    """Rules `strict` and `exact_match`, which differ in how drafts are drawn."""

    drawn: Drawn = Drawn.BEST
    needs_best_tokens_alone = True

    def judge(self, candidates: Candidates) -> Judged:
        target, bad_rows = sample_target_tokens(candidates.logits, candidates.sampling)
        tokens, lens = self.accept(candidates, target)
        return Judged(tokens, lens, bad_rows)

    def accept(self, candidates: Candidates, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return strict_acceptance(tokens, candidates.drafts, candidates.num_contexts)

    def by_kernel(self, candidates: Candidates, forced_len: int = 0) -> Accepted | None:
        if candidates.sampling.all_greedy:
            return greedy_kernel(candidates, forced_len)
        return sampled_kernel(candidates, forced_len)


def strict_acceptance(
    target_tokens: Tensor, draft_tokens: Tensor, num_contexts: int
) -> tuple[Tensor, Tensor]:
    """Returns a step's tokens and lengths before masking.

    Args:
        target_tokens: [C + G*(K+1)] int32, the target's choice at every logits row.
        draft_tokens: [G, K] int32.

    Returns:
        (tokens [B, K+1] int32, a context's one token in column 0; lens [B] int32).
    """
    num_generations, num_drafts = draft_tokens.shape
    contexts = target_tokens.new_full((num_contexts, num_drafts + 1), -1)
    contexts[:, 0] = target_tokens[:num_contexts]
    generations = target_tokens[num_contexts:].view(num_generations, num_drafts + 1)
    lens = torch.cat(
        [
            torch.ones(num_contexts, dtype=torch.int32, device=target_tokens.device),
            count_accepted(generations, draft_tokens),
        ]
    )
    return torch.cat([contexts, generations]), lens
