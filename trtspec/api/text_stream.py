"""`TextStream`: decodes tokens to text as they arrive, and finds stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what bytes of an unfinished character decode to


class TextStream:
    """The text of one request so far; it only ever grows, except that a stop string cuts it.

    The usual two-offset window: the tokens since `_prefix` are decoded with and without the new
    ones, and the difference is new text unless it ends inside a character. (`tokenizers` has a
    DecodeStream, which raises on some sequences of byte-fallback tokenizers.) Special tokens are
    not part of the text. Without a tokenizer the text stays empty.
    """

    def __init__(self, tokenizer: Any | None, stop_strings: tuple[str, ...] = ()):
        self._tokenizer, self._stops = tokenizer, stop_strings
        self._ids: list[int] = []
        self._text, self._stopped = "", False
        self._prefix, self._read = 0, 0  # tokens before _read are in the text

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Decodes what is new in `token_ids` (all output ids so far).

        Returns True once a stop string is in the text, which then ends before it.
        """
        return self.extend_with(token_ids[len(self._ids) :])

    def extend_with(self, new: Sequence[int]) -> bool:
        """Does the same for output ids that follow those it knows."""
        if self._tokenizer is None:
            return False
        for token in new:
            if self._stopped:
                break
            self._ids.append(token)
            piece = self._new_text()
            if piece and not piece.endswith(_INCOMPLETE):
                self._take(piece)
        return self._stopped

    def _new_text(self) -> str:
        before = self._decode(self._ids[self._prefix : self._read])
        return self._decode(self._ids[self._prefix :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _take(self, piece: str) -> None:
        start = max(0, len(self._text) - max((len(s) for s in self._stops), default=0))
        text = self._text + piece
        found = [i for i in (text.find(s, start) for s in self._stops) if i >= 0]
        if found:
            text = text[: min(found)]
        # At once: an interrupt leaves all of it or nothing.
        self._prefix, self._read, self._text, self._stopped = (
            self._read,
            len(self._ids),
            text,
            bool(found),
        )

    def safe_text(self) -> str:
        """Returns the text that no later token can change: without a tail that may start a stop."""
        text = self._text
        if self._stopped:
            return text
        starts = ((s, min(len(s), len(text) + 1)) for s in self._stops)
        held = max(
            (n for s, end in starts for n in range(1, end) if text.endswith(s[:n])), default=0
        )
        return text[: len(text) - held]

    def final(self) -> str:
        """Returns all of the text, once the request ended. An unfinished character stays marked."""
        if self._tokenizer is not None and not self._stopped:
            piece = self._new_text()
            if piece:
                self._take(piece)
        return self._text
