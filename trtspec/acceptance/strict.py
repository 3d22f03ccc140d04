"""Strict acceptance: a draft is kept while it is exactly the target's own choice.

Lossless for greedy requests. For sampled ones the target's token is drawn first and a draft must
match it exactly, which is lossless too (the output is the target's sample, whatever was drafted).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.tokens.accept import count_accepted, mask_after


def strict_acceptance(
    target_tokens: Tensor, draft_tokens: Tensor, num_contexts: int
) -> tuple[Tensor, Tensor]:
    """Rows and lengths of a step before masking.

    Args:
        target_tokens: [C + G*(K+1)] int32, the target's choice at every logits row.
        draft_tokens: [G, K] int32.

    Returns:
        (tokens [B, K+1] int32 with the context's one token in column 0, lens [B] int32).
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


def finish_rows(tokens: Tensor, lens: Tensor) -> Tensor:
    """Masks everything past each length with -1: [B, K+1] int32."""
    return mask_after(tokens, lens).to(torch.int32)
