"""Masks a step's logits by its requests' grammars."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata.guided import DraftPoint, GuidedStep, VerifyPoint
from ..ops.tokens.bitmask import mask_logits


def mask_target(guided: GuidedStep, logits: Tensor) -> Tensor:
    """Returns the target's logits [R, V], -inf where a token is not allowed."""
    guided.reach(VerifyPoint())
    masks = guided.comm.all_gather(guided.verify_masks[: logits.shape[0]])[0]
    return mask_logits(logits, masks, None)


def revive_rows(logits: Tensor, num_contexts: int, num_drafts: int) -> Tensor:
    """Returns logits [C + G*(K'+1), V] with zeros in rows after drafts of which nothing is left.

    A grammar and bans may leave nothing after a draft that will be rejected. That is no error of
    the request. Should the draft be accepted, what comes out breaks the grammar.
    """
    rows = torch.arange(logits.shape[0], device=logits.device) - num_contexts
    is_after_draft = (rows >= 0) & (rows % (num_drafts + 1) > 0)
    is_empty = logits.amax(1) == float("-inf")
    return logits.masked_fill((is_empty & is_after_draft)[:, None], 0.0)


def mask_drafts(guided: GuidedStep, logits: Tensor, d2t: Tensor | None, depth: int) -> Tensor:
    """Returns a drafter's logits [B, Vd], -inf where a token is not allowed.

    Only the first `num_masked_drafts` are masked. A row of which nothing is allowed stays free: its
    draft will be rejected.
    """
    if depth >= guided.num_masked_drafts:
        return logits
    if depth == 0:
        assert guided.accepted is not None
        point = DraftPoint(0, *guided.accepted)
    else:
        assert guided.last_drafts is not None
        point = DraftPoint(depth, guided.last_drafts, None)
    guided.reach(point)
    masks = guided.comm.all_gather(guided.draft_masks[: logits.shape[0]])[0]
    masked = mask_logits(logits, masks, d2t)
    has_any = (masked > float("-inf")).any(1, keepdim=True)
    return torch.where(has_any, masked, logits)
