"""`TextStream`: decodes tokens to text as they arrive, and finds stop strings in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_INCOMPLETE = "\ufffd"  # what bytes of an unfinished character decode to
_FOR_BPE = "_for_bpe_even_though_it_will_corrupt_output"  # of an attribute of transformers


class TextStream:
    """The text of one request so far; it only ever grows, except that a stop string cuts it.

    Where a token's text depends on the one before it, the usual two-offset window: the tokens since
    `_prefix` are decoded with and without the new ones. The difference is new text unless it ends
    inside a character. (`tokenizers` has a DecodeStream, which raises on some sequences of
    byte-fallback tokenizers.) Special tokens are not part of the text. Without a tokenizer the text
    stays empty.
    """

    def __init__(self, tokenizer: Any | None, stop_strings: tuple[str, ...] = ()):
        self._decode = None if tokenizer is None else decoder_of(tokenizer)
        self._stops, self._is_local = stop_strings, is_local(tokenizer)
        self._is_single = bool(stop_strings)  # whether tokens are added one by one
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
        if self._decode is None or not new:
            return self._stopped
        if self._is_single:
            self._add_each(new)
        elif not self._add(new) and len(new) > 1:
            # The last character is not complete. What comes before it is sure.
            del self._ids[len(self._ids) - len(new) :]
            self._add_each(new)
        return self._stopped

    def _add_each(self, new: Sequence[int]) -> None:
        for token in new:
            if self._stopped:
                break
            self._add((token,))

    def _add(self, new: Sequence[int]) -> bool:
        """Adds ids. Returns whether they end with a whole character."""
        self._ids += new
        piece = self._new_text()
        if _INCOMPLETE in piece and not (self._is_local or self._is_single):
            self._start_over()
            return True
        whole = piece.rstrip(_INCOMPLETE)
        is_whole = bool(piece) and whole == piece
        if is_whole or self._first_stop(self._text + whole) >= 0:
            self._take(whole)
        return is_whole

    def _start_over(self) -> None:
        """Adds all ids anew, one by one, as it does from now on.

        Bytes that are no character also spoil whole ones that come in the same step. So the text
        would depend on the steps.
        """
        single = self.emptied()
        single._is_single = True
        single._add_each(self._ids)
        vars(self).update(vars(single))  # at once

    def emptied(self) -> TextStream:
        """Returns a stream without tokens that is like this one."""
        empty = copy.copy(self)
        empty._ids, empty._text, empty._stopped = [], "", False
        empty._prefix = empty._read = 0
        return empty

    def _new_text(self) -> str:
        assert self._decode is not None
        if self._is_local:  # the text ends with a whole character
            return self._decode(self._ids[self._read :])
        before = self._decode(self._ids[self._prefix : self._read])
        return self._decode(self._ids[self._prefix :])[len(before) :]

    def _first_stop(self, text: str) -> int:
        """Returns where the first stop string begins in the text with a new end; -1: nowhere."""
        if not self._stops:
            return -1
        start = max(0, len(self._text) - max(map(len, self._stops)))
        found = (text.find(stop, start) for stop in self._stops)
        return min((i for i in found if i >= 0), default=-1)

    def _take(self, piece: str) -> None:
        text = self._text + piece
        stop = self._first_stop(text)
        # At once: an interrupt leaves all of it or nothing.
        self._prefix, self._read, self._text, self._stopped = (
            self._read,
            len(self._ids),
            text if stop < 0 else text[:stop],
            stop >= 0,
        )

    def safe_text(self) -> str:
        """Returns the text that no later token can change: without a tail that may start a stop."""
        text = self._text
        if self._stopped or not self._stops:
            return text
        starts = ((s, min(len(s), len(text) + 1)) for s in self._stops)
        held = max(
            (n for s, end in starts for n in range(1, end) if text.endswith(s[:n])), default=0
        )
        return text[: len(text) - held]

    def final(self) -> str:
        """Returns all of the text, once the request ended. An unfinished character stays marked."""
        if self._decode is not None and not self._stopped:
            piece = self._new_text()
            if piece:
                self._take(piece)
        return self._text


def decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """Returns what decodes ids without special tokens, as `tokenizer.decode` does.

    transformers' part of a fast tokenizer is left out: it takes three times what decoding takes.
    """
    if _is_plain(tokenizer):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def special_token_ids(tokenizer: Any) -> list[int]:
    """Returns the ids of tokens that are no text (end of turn, padding …), ascending.

    A tokenizer may flag more of them than it names, as Llama 3's does.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    flagged = {index for index, token in added.items() if getattr(token, "special", False)}
    return sorted(flagged | set(tokenizer.all_special_ids))


def is_local(tokenizer: Any) -> bool:
    """Returns whether a token's bytes are the same behind any other, as in GPT-2's kind."""
    return (
        _is_plain(tokenizer) and type(tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"
    )


def _is_plain(tokenizer: Any) -> bool:
    """Returns whether `tokenizers` alone decodes."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return False
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, Fast)
        or kind.decode != Fast.decode
        or kind._decode != Fast._decode
    ):
        return False
    if not tokenizer.clean_up_tokenization_spaces:
        return True
    # Of BPE newer versions clean nothing up.
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return is_bpe and not getattr(tokenizer, f"clean_up_tokenization_spaces{_FOR_BPE}", True)
