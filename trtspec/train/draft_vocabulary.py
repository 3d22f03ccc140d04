"""The tokens that an EAGLE-3 head drafts among: the most frequent ones of its training text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .data import DataError, Example


class DraftVocabulary(NamedTuple):
    ids: Tensor
    """[size] int64, ascending target ids."""
    coverage: float
    """Share of the tokens to be predicted that are among them."""


def draft_vocabulary(
    examples: Iterable[Example], size: int, vocab_size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """Returns the `size` most frequent tokens under the loss mask, lower ids first among equals.

    Args:
        always: ids to include whatever their count: `special_token_ids(tokenizer)`, the model's end
            tokens.

    Raises:
        DataError: the size is not in 1 … vocab_size or too small for `always`, an id is outside
            the vocabulary, or there is no token to predict.
    """
    forced = sorted(set(always))
    if not 1 <= size <= vocab_size or len(forced) > size:
        raise DataError(
            f"A draft vocabulary of {size} tokens, {len(forced)} of them always in: it must be in "
            f"{max(len(forced), 1)} … {vocab_size} (the target's)."
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for example in examples:
        tokens = example.input_ids[example.loss_mask]
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise DataError(f"Token id {int(tokens.max())}: ids must be below {vocab_size}.")
        counts += torch.bincount(tokens, minlength=vocab_size)
    total = int(counts.sum())
    if not total:
        raise DataError("No example has a token to predict, so none is frequent. Give more text.")
    if forced and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise DataError(f"always={forced}: ids must be in 0 … {vocab_size - 1}.")
    ranked = counts.clone()
    ranked[forced] = total + 1
    chosen = torch.sort(ranked, descending=True, stable=True).indices[:size].sort().values
    return DraftVocabulary(chosen, int(counts[chosen].sum()) / total)


def d2t_offsets(ids: Tensor) -> Tensor:
    """Returns the offsets d2t [size] int64, as heads store them: target_id = draft_id +
    d2t[draft_id]."""
    return ids - torch.arange(len(ids), dtype=torch.int64, device=ids.device)
