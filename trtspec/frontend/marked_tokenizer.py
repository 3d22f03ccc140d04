"""`MarkedTokenizer`: decodes special tokens that mark tool calls or reasoning as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..api.text_stream import special_token_ids


def keep_markers(tokenizer: Any, markers: Sequence[str]) -> Any:
    """Returns a tokenizer whose decoded text has these markers, special tokens or not.

    Text is decoded without special tokens, and some families mark tool calls or reasoning with
    such. Where none of the markers is one, the tokenizer itself is returned.
    """
    if not markers:
        return tokenizer
    numbers = special_token_ids(tokenizer)
    texts = tokenizer.convert_ids_to_tokens(numbers)
    kept = {  # a marker may be such a token and more
        number
        for number, text in zip(numbers, texts, strict=True)
        if text and any(text in marker for marker in markers)
    }
    return MarkedTokenizer(tokenizer, kept, set(numbers) - kept) if kept else tokenizer


class MarkedTokenizer:
    """A tokenizer that decodes some special tokens as text. All else is the tokenizer's."""

    def __init__(self, tokenizer: Any, kept: set[int], dropped: set[int]):
        self._tokenizer, self._kept, self._dropped = tokenizer, kept, dropped

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, **options: Any
    ) -> str:
        if skip_special_tokens and not self._kept.isdisjoint(token_ids):
            token_ids = [number for number in token_ids if number not in self._dropped]
            skip_special_tokens = False
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
