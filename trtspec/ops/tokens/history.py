"""Texts of requests by slot, which grow by a step's accepted tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..launch.dispatch import twin


@twin("tokens.triton_lookup")
def append_tokens(
    history: Tensor, history_lens: Tensor, slots: Tensor, tokens: Tensor, counts: Tensor
) -> Tensor:
    """Writes tokens behind the texts of slots, and their new lengths.

    The last column is scratch: texts end before it, and tokens beyond are lost. So is the last
    slot, to which rows point that only fill up a batch: its text stays empty.

    Args:
        history: [slots, L] int32, changed. history_lens: [slots] int64, changed.
        slots: [B] int64. tokens: [B, N] int32. counts: [B] int, how many of each are written.

    Returns:
        [B] int64, the lengths.
    """
    scratch = history.shape[1] - 1
    is_scratch = slots == history.shape[0] - 1
    lens, counts = (given.masked_fill(is_scratch, 0) for given in (history_lens[slots], counts))
    offsets = torch.arange(tokens.shape[1], device=tokens.device)
    columns = torch.where(offsets < counts[:, None], lens[:, None] + offsets, scratch)
    history[slots[:, None], columns.clamp(max=scratch)] = tokens
    lens = (lens + counts).clamp(max=scratch)
    history_lens[slots] = lens
    return lens
