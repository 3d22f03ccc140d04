"""Strict acceptance: how many drafts match the target's tokens.

That number names the accepted path, because it is a chain (`metadata/accepted_path.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_accepted(target_tokens: Tensor, draft_tokens: Tensor) -> Tensor:
    """Counts accepted tokens, bonus included: target_tokens [G, K+1], draft_tokens [G, K] -> [G]
    int32 in 1 … K+1.

    n = 1 + number of leading drafts equal to the target's choice. A draft of -1 never matches.
    """
    matches = (target_tokens[:, :-1] == draft_tokens).to(torch.int32)
    return 1 + matches.cumprod(dim=1).sum(dim=1, dtype=torch.int32)


def mask_after(tokens: Tensor, lens: Tensor) -> Tensor:
    """Sets tokens [B, K+1] to -1 from column lens [B] on."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(columns < lens[:, None], tokens, -1)


def last_accepted(tokens: Tensor, lens: Tensor) -> Tensor:
    """Returns the bonus token of each request: tokens [B, K+1], lens [B] -> [B]."""
    return tokens.gather(1, (lens.to(torch.int64) - 1)[:, None])[:, 0]
