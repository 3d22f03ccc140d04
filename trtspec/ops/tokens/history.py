"""Texts of requests by slot, which grow by a step's accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..launch.dispatch import twin
from .ring import OWNER_WORDS

BEGUN_WORDS = 3 + OWNER_WORDS
"""int64 words of a text that begins: its slot, where its tokens are, how many; and its owner's."""


@twin("tokens.triton_lookup")
def begin_texts(
    history: Tensor,
    history_lens: Tensor,
    owners: Tensor | None,
    words: Tensor,
    begun: Sequence[tuple[int, int]],
) -> None:
    """Writes texts of requests that enter slots, over what the slots held.

    Args:
        history: [slots, L] int32, changed. history_lens: [slots] int64, changed.
        owners: [slots, OWNER_WORDS] int64, changed, or None.
        words: int64. BEGUN_WORDS of each text, then the tokens of all as int32. Where a text's
            tokens are is counted in int32 from the start.
        begun: each text's slot and number of tokens <= L, on the host. No slot comes twice.
    """
    heads = words[: len(begun) * BEGUN_WORDS].view(len(begun), BEGUN_WORDS)
    tokens, first, slots = words.view(torch.int32), 2 * heads.numel(), heads[:, 0]
    for slot, count in begun:
        history[slot, :count] = tokens[first : first + count]
        first += count
    history_lens[slots] = heads[:, 2]
    if owners is not None:
        owners[slots] = heads[:, 3:]


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
