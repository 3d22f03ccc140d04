"""Tokens to text while they arrive, and stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """The text of one request so far.

    Uses `tokenizers`' own DecodeStream, which holds back incomplete UTF-8. Special tokens are not
    part of the text. Without a tokenizer the text stays empty.
    """

    def __init__(self, tokenizer: Any | None, stop_strings: tuple[str, ...] = ()):
        self._tokenizer, self._stops = tokenizer, stop_strings
        self._text, self._ids, self._stopped = "", [0][:0], False
        self._stream: Any = None
        if tokenizer is not None:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream(skip_special_tokens=True)

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Takes what is new in `token_ids` (all output ids so far). True once a stop string is
        in the text, which then ends before it."""
        if self._tokenizer is None:
            return False
        while len(self._ids) < len(token_ids) and not self._stopped:
            self._ids.append(token_ids[len(self._ids)])
            piece = self._stream.step(self._tokenizer._tokenizer, self._ids[-1])
            if piece:
                self._append(piece)
        return self._stopped

    def _append(self, piece: str) -> None:
        start = max(0, len(self._text) - max((len(s) for s in self._stops), default=0))
        self._text += piece
        found = [i for i in (self._text.find(s, start) for s in self._stops) if i >= 0]
        if found:
            self._text, self._stopped = self._text[: min(found)], True

    def safe_text(self) -> str:
        """The text that no later token can take back: without a tail that may start a stop."""
        text = self._text
        if self._stopped:
            return text
        held = max(
            (n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0
        )
        return text[: len(text) - held]

    def final(self) -> str:
        """The whole text, at the end of the request."""
        if self._stopped or self._tokenizer is None:
            return self._text
        # Bytes of a character that never completed come out as replacement characters.
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)
