"""Masks of the vocabulary, one bit a token: what a grammar allows.

A mask is a row [W] int32, W = ceil(V / 32): bit t % 32 of word t // 32 allows token t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.dispatch import twin


@twin("tokens.triton_bitmask")
def mask_logits(logits: Tensor, masks: Tensor, d2t: Tensor | None) -> Tensor:
    """Returns logits [R, V] with -inf where a token is not allowed.

    Args:
        masks: [>= R, W] int32, over the target's tokens.
        d2t: [V] int64 offsets of a draft vocabulary, target_id = draft_id + d2t[draft_id].
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    if d2t is not None:
        ids = ids + d2t
    words = masks[: logits.shape[0], ids // 32]
    allowed = (words >> (ids % 32).to(torch.int32)) & 1
    return logits.masked_fill(allowed == 0, float("-inf"))
