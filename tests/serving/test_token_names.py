"""Texts and bytes of single tokens, for the vocabularies that there are."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from trtspec.api.outputs import Logprob
from trtspec.frontend.outputs import NOTHING_NEW
from trtspec.serving.answers import LEAST_LOGPROB, TokenTexts, logprobs_by_text
from trtspec.serving.token_names import TokenNames


def byte_level() -> Any:
    """Each byte is a token, and é is one too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({char: i for i, char in enumerate([*alphabet, "Ã©"])}, [("Ã", "©")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.add_tokens([AddedToken("<|endé|>", special=True)], special_tokens=True)
    return fast


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "\u2581the", "the", "\u2581", "a", "\ufffd", *BYTES]


def byte_fallback() -> Any:
    """As Llama 2's: the decoder drops the first space."""
    model = BPE({p: i for i, p in enumerate(PIECES)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces, no_first = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    parts = [spaces, decoders.ByteFallback(), decoders.Fuse(), no_first]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


LEVEL, FALLBACK = byte_level(), byte_fallback()


@given(text=st.text(st.characters(codec="utf-8"), max_size=20))
def test_bytes_of_a_byte_level_vocabulary_are_the_texts(text: str) -> None:
    names = TokenNames(LEVEL)
    found = [names[token] for token in LEVEL.encode(text)]
    assert b"".join(bytes(name.bytes or []) for name in found) == text.encode()
    for name in found:
        escaped = "".join(f"\\x{byte:02x}" for byte in name.bytes or [])
        assert name.text.encode() == bytes(name.bytes or []) or name.text == f"bytes:{escaped}"


def test_names_of_a_byte_level_vocabulary_are_distinct() -> None:
    names = TokenNames(LEVEL)
    texts = [names[token].text for token in range(len(LEVEL))]
    assert len(set(texts)) == len(texts)
    assert names[LEVEL.convert_tokens_to_ids("<|endé|>")].text == "<|endé|>"
    assert names[LEVEL.convert_tokens_to_ids("Ã©")] == ("é", [0xC3, 0xA9])
    assert names[LEVEL.convert_tokens_to_ids("Ã")] == ("bytes:\\xc3", [0xC3])


def test_a_vocabulary_with_byte_fallback() -> None:
    names = TokenNames(FALLBACK)
    found = {piece: names[i] for i, piece in enumerate(PIECES)}
    assert found["\u2581the"] == (" the", list(b" the"))
    assert found["the"] == ("the", list(b"the"))
    assert found["\u2581"] == (" ", [32])
    assert found["<0x41>"] == ("A", [65])
    assert found["<0xE2>"] == ("bytes:\\xe2", [0xE2])
    assert found["\ufffd"] == ("\ufffd", list("\ufffd".encode()))


def test_tokens_without_known_bytes_have_their_number() -> None:
    assert TokenNames(None)[7] == ("token_id:7", None)

    class Slow:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join("\ufffd" if token == 1 else "a" for token in tokens)

    names = TokenNames(Slow())
    assert names[1] == ("token_id:1", None) and names[2] == ("a", [97])


def test_two_tokens_of_one_text_are_two_entries() -> None:
    names = TokenNames(FALLBACK)
    a, byte = PIECES.index("a"), PIECES.index("<0x61>")
    known = {byte: Logprob(-0.5, 1), a: Logprob(-1.0, 2), 1: Logprob(-2.0, 3)}
    both = {"a": -0.5, f"token_id:{a}": -1.0, " the": -2.0}
    assert logprobs_by_text(names, known, 3, byte) == both
    assert logprobs_by_text(names, known, 3, 1) == both
    assert logprobs_by_text(names, known, 1, byte) == {"a": -0.5}
    chosen = {f"token_id:{byte}": -0.5, "a": -1.0}  # by the name that `tokens` has
    assert logprobs_by_text(names, known, 2, a) == chosen


def test_a_chosen_token_is_there_beside_likelier_ones() -> None:
    names = TokenNames(FALLBACK)
    known = {PIECES.index("a"): Logprob(-0.5, 1), 1: Logprob(-2.0, 9)}
    assert logprobs_by_text(names, known, 1, 1) == {"a": -0.5, " the": -2.0}
    assert logprobs_by_text(names, known, 0, 1) == {" the": -2.0}


def test_what_cannot_come_has_a_number_too() -> None:
    """JSON has no infinity."""
    known = {PIECES.index("a"): Logprob(float("-inf"), 1)}
    a = PIECES.index("a")
    assert logprobs_by_text(TokenNames(FALLBACK), known, 1, a) == {"a": LEAST_LOGPROB}


def test_texts_of_tokens_have_what_an_end_inside_a_character_leaves() -> None:
    ids = LEVEL.encode("aé漢")[:-1]
    texts = TokenTexts(LEVEL)
    first = NOTHING_NEW._replace(token_ids=ids[:2], sources=[0, 0])
    last = NOTHING_NEW._replace(token_ids=ids[2:], sources=[0, 1], finish_reason="length")
    said = [token["text"] for piece in (first, last) for token in texts.of(piece)]
    assert said == ["a", "é", "", "\ufffd"]
    assert "".join(said) == LEVEL.decode(ids)
