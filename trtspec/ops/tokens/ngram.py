"""Prompt lookup (Saxena, 2023) as one batched op: drafts are copied from the sequence so far."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.dispatch import twin


@twin("tokens.triton_lookup")
def propose_ngrams(
    history: Tensor,
    lens: Tensor,
    max_draft_len: int,
    max_ngram: int,
    min_ngram: int,
    prefer_oldest: bool,
) -> Tensor:
    """Finds the longest earlier occurrence of each row's last tokens and copies what followed.

    A match of n tokens, min_ngram <= n <= max_ngram, ends at a position before the row's last
    token. Longer matches win, then the newest (or the oldest with `prefer_oldest`). A match closer
    to the end than `max_draft_len` makes the copy read what it wrote, as in LZ77. So a sequence
    with period p is continued with period p.

    Args:
        history: [B, L] int32, token ids (prompt and output); entries past the length are ignored.
        lens: [B] int, number of known tokens per row, at most L.

    Returns:
        [B, max_draft_len] int32; rows without a match are -1.
    """
    size = history.shape[1]
    position = torch.arange(size, device=history.device)
    last = lens.to(torch.int64)[:, None] - 1  # [B, 1]
    is_past = position < last  # a match must end before the last token
    run = is_past.to(torch.int32)  # becomes 1 while the last j+1 tokens agree
    match_len = torch.zeros_like(run)
    for j in range(max_ngram):
        suffix = history.gather(1, (last - j).clamp_min(0))  # [B, 1]
        shifted = torch.full_like(history, -1)
        shifted[:, j:] = history[:, : size - j]
        run = run * ((shifted == suffix) & (last >= j))
        match_len = match_len + run
    order = size - 1 - position if prefer_oldest else position
    score = match_len.to(torch.int64) * size + order
    score = torch.where((match_len >= min_ngram) & is_past, score, -1)
    best_score, end = score.max(dim=1, keepdim=True)  # [B, 1]
    period = (last - end).clamp_min(1)
    step = torch.arange(max_draft_len, device=history.device)
    drafts = history.gather(1, (end + 1 + step % period).clamp(0, size - 1))
    return torch.where(best_score >= 0, drafts, -1)
