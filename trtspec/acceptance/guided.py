"""Masks a step's logits by its requests' grammars."""

from __future__ import annotations

import torch
from torch import Tensor

from ..metadata.guided import ChosenPoint, DraftPoint, GuidedStep, VerifyPoint
from ..ops.tokens.bitmask import mask_logits
from ..ops.tokens.handover import read_from_host, write_to_host


def mask_target(guided: GuidedStep, logits: Tensor) -> Tensor:
    """Returns the target's logits [R, V], -inf where a token is not allowed."""
    guided.host_part(VerifyPoint())
    masks = guided.comm.all_gather(guided.verify_masks[: logits.shape[0]])[0]
    return mask_logits(logits, masks, None)


def hand_over_accepted(guided: GuidedStep, *, has_pass: bool) -> None:
    """Leaves for the host what was accepted, if it masks the drafts.

    Args:
        has_pass: whether the drafter has a pass to run before the first draft is drawn.
    """
    if guided.accepted is None or guided.num_masked_drafts == 0:
        return
    (tokens, lens), guided.accepted = guided.accepted, None
    write_to_host(tokens, guided.handed_over.tokens)
    write_to_host(lens, guided.handed_over.lens)
    if has_pass:
        guided.host_part(ChosenPoint())


def hand_over_drafts(guided: GuidedStep, drafts: Tensor, depth: int, *, has_pass: bool) -> None:
    """Leaves for the host the drafts [B] that were drawn at a depth, if it masks the next ones.

    Args:
        has_pass: whether the drafter has a pass to run before the next ones are drawn.
    """
    if depth + 1 < guided.num_masked_drafts:
        write_to_host(drafts, guided.handed_over.drafts)
        if has_pass:
            guided.host_part(ChosenPoint())


def mask_drafts(guided: GuidedStep, logits: Tensor, d2t: Tensor | None, depth: int) -> Tensor:
    """Returns a drafter's logits [B, Vd], -inf where a token is not allowed.

    Only the first `num_masked_drafts` are masked. A row of which nothing is allowed stays free: its
    draft will be rejected.
    """
    if depth >= guided.num_masked_drafts:
        return logits
    hand_over_accepted(guided, has_pass=False)  # where no worker did
    guided.host_part(DraftPoint(depth))
    masks = guided.draft_masks[: logits.shape[0]]
    if guided.handed_over.masks is not guided.draft_masks:
        read_from_host(masks, guided.handed_over.masks)
    masked = mask_logits(logits, guided.comm.all_gather(masks)[0], d2t)
    has_any = (masked > float("-inf")).any(1, keepdim=True)
    return torch.where(has_any, masked, logits)
