"""Relaxed acceptance for thinking phases (TensorRT-LLM's, for DeepSeek-R1). Lossy by intent.

While a greedy request thinks, a draft is kept if it is among the target's `top_k` tokens *and* its
probability is at least the top one's minus `delta`. What comes out are the draft tokens, then the
target's own token at the first miss. Outside a thinking phase acceptance is strict.

Whether a slot thinks is one number per slot: its delta, or `NOT_THINKING`. A request thinks if the
last marker of its prompt is `begin`, until `end` is among the tokens it accepts; that takes effect
in the next step. A `begin` that the model writes itself changes nothing: what is lossy starts only
where the prompt asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.tokens.accept import mask_after

NOT_THINKING = -1.0


def delta_of_text(
    prompt: Sequence[int], output: Sequence[int], begin: int, end: int, delta: float
) -> float:
    """The delta of a request with this prompt and, after a preemption, this output so far."""
    for token in reversed(prompt):
        if token in (begin, end):
            return delta if token == begin and end not in output else NOT_THINKING
    return NOT_THINKING


def relaxed_matches(logits: Tensor, drafts: Tensor, deltas: Tensor, top_k: int) -> Tensor:
    """Which drafts are close enough to the target's best.

    Args:
        logits: [G, K, V], the target's at the rows that judge the drafts, temperature 1.
        drafts: [G, K] int32, -1 never matches.
        deltas: [G] float32, `NOT_THINKING` matches nothing.

    Returns:
        [G, K] bool.
    """
    logits = logits.float()
    own = logits.gather(-1, drafts.clamp_min(0).to(torch.int64)[..., None])  # [G, K, 1]
    is_in_top_k = (logits > own).sum(-1) < top_k
    total = logits.logsumexp(-1)
    best = (logits.amax(-1) - total).exp()
    close = (own[..., 0] - total).exp() >= best - deltas[:, None]
    is_possible = own[..., 0] > float("-inf")  # not masked by a grammar
    return is_in_top_k & close & is_possible & (drafts >= 0) & (deltas[:, None] >= 0)


def relaxed_acceptance(
    target_tokens: Tensor, drafts: Tensor, relaxed: Tensor
) -> tuple[Tensor, Tensor]:
    """Strict acceptance, or better where a draft is close enough.

    Args:
        target_tokens: [G, K+1] int32. drafts: [G, K] int32. relaxed: [G, K] bool.

    Returns:
        (tokens [G, K+1] int32: the drafts while they are kept, the target's tokens after that;
        lens [G] int32 in 1 … K+1).
    """
    kept = ((drafts == target_tokens[:, :-1]) | relaxed).to(torch.int32).cumprod(dim=1)
    own = torch.where(kept.bool(), drafts, target_tokens[:, :-1])
    lens = 1 + kept.sum(dim=1, dtype=torch.int32)
    return torch.cat([own, target_tokens[:, -1:]], dim=1), lens


def next_deltas(deltas: Tensor, tokens: Tensor, lens: Tensor, end: int) -> Tensor:
    """[B] deltas after accepting tokens [B, K+1] of lengths lens [B]."""
    has_ended = (mask_after(tokens, lens) == end).any(1)
    return torch.where(has_ended, NOT_THINKING, deltas)
