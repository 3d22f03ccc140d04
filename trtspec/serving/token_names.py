"""`TokenNames`: the text and the bytes of single tokens, as log probabilities name them."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

INCOMPLETE = "\ufffd"  # what a part of a character decodes to
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenName(NamedTuple):
    """A token's text. A part of a character has none: its name then is `bytes:\\xe2\\x82`."""

    text: str
    bytes: list[int] | None  # None: the tokenizer does not say


class TokenNames:
    """Names of tokens, special ones too. A token without text or known bytes is `token_id:7`.

    Args:
        tokenizer: of transformers, or None.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._decoders = _decoders_of(tokenizer)
        self._known: dict[int, TokenName] = {}

    def __getitem__(self, token: int) -> TokenName:
        name = self._known.get(token)
        if name is None:
            name = self._known[token] = self._make(token)
        return name

    def _make(self, token: int) -> TokenName:
        number = f"token_id:{token}"
        if self._tokenizer is None:
            return TokenName(number, None)
        text = self._decode([token])
        if INCOMPLETE not in text:
            # Behind another token: some decoders drop the space of the first.
            text = self._decode([token, token])[len(text) :]
            return TokenName(text, list(text.encode("utf-8", "replace")))
        raw = self._bytes(token)
        if raw is None:
            return TokenName(number, None)
        try:
            return TokenName(raw.decode(), list(raw))  # the character U+FFFD itself
        except UnicodeDecodeError:
            escaped = "".join(f"\\x{byte:02x}" for byte in raw)
            return TokenName(f"bytes:{escaped}", list(raw))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _bytes(self, token: int) -> bytes | None:
        """Returns the bytes of a part of a character, where the vocabulary holds bytes."""
        if not self._decoders:
            return None
        added = self._tokenizer.added_tokens_decoder.get(token)
        if added is not None:  # it is text, which a byte-level decoder may garble
            return str(added.content).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        byte = _BYTE_TOKEN.fullmatch(piece)
        if "ByteFallback" in self._decoders and byte is not None:
            return bytes.fromhex(byte[1])
        if "ByteLevel" in self._decoders and all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        return piece.encode() if INCOMPLETE in piece else None


def _decoders_of(tokenizer: Any) -> set[str]:
    """Returns the kinds of a fast tokenizer's decoders; none of any other tokenizer."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))}


def _printable_bytes() -> dict[str, int]:
    """Returns character -> byte of a byte-level vocabulary.

    Bytes that Latin-1 prints stand for themselves, the others for U+0100 and what follows it.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _printable_bytes()
