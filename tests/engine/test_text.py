"""Streaming text, with byte-fallback (Llama-2, Mistral) and byte-level (GPT-2) tokenizers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trtspec.api.text_stream import TextStream, decoder_of, is_local


class _Wrapped:
    def __init__(self, tokenizer: Tokenizer):
        self.inner = tokenizer

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module", params=["byte_fallback", "byte_level"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "byte_fallback":
        vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
        vocab |= {token: 256 + i for i, token in enumerate(["<unk>", "▁", "a", "é", "▁the"])}
        model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>")
        inner = Tokenizer(model)
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
        inner.decoder = decoders.ByteLevel()
    return _Wrapped(inner)


def test_pieces_add_up_to_the_text_whatever_the_tokens(tokenizer: Any) -> None:
    rng = random.Random(0)
    size = tokenizer.inner.get_vocab_size()
    for _ in range(300):
        ids = [rng.randrange(size) for _ in range(rng.randint(1, 20))]
        stream, shown = TextStream(tokenizer), ""
        for count in range(1, len(ids) + 1):
            stream.extend(ids[:count])
            assert stream.safe_text().startswith(shown)
            shown = stream.safe_text()
        assert stream.final().startswith(shown)


def test_whole_characters_decode_as_at_once(tokenizer: Any) -> None:
    text = "a é 日本 🙂 the end"
    ids = [byte for byte in text.encode()]
    if tokenizer.inner.token_to_id("<unk>") is None:
        ids = tokenizer.inner.encode(text).ids or []
        table = _byte_alphabet()
        ids = [tokenizer.inner.token_to_id(table[byte]) for byte in text.encode()]
    stream = TextStream(tokenizer)
    stream.extend(ids)
    assert stream.final() == text == tokenizer.decode(ids)


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_step_at_once_is_its_tokens_one_by_one(tokenizer: Any, is_fast: bool) -> None:
    """What is sure after each step, too. A fast tokenizer of transformers is called directly."""
    given = PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner) if is_fast else tokenizer
    is_byte_level = tokenizer.inner.token_to_id("<unk>") is None
    assert is_local(given) == (is_fast and is_byte_level)
    rng, texts = random.Random(1), ["日本🙂", "a é the", "\ufffd", "\u0301x"]
    for _ in range(200):
        ids = [rng.randrange(tokenizer.inner.get_vocab_size()) for _ in range(rng.randint(1, 6))]
        for byte in rng.choice(texts).encode():
            ids.append(byte if not is_byte_level else tokenizer.inner.token_to_id(TABLE[byte]))
        single, steps = TextStream(tokenizer), TextStream(given)
        while ids:
            new, ids = ids[: (count := rng.randint(1, 8))], ids[count:]
            for token in new:
                single.extend_with([token])
            steps.extend_with(new)
            assert steps.safe_text() == single.safe_text()
        assert steps.final() == single.final()
        if is_fast and is_byte_level:
            assert steps.final() == given.decode(steps._ids)


def test_bytes_that_are_no_character_leave_the_text_before_them(tokenizer: Any) -> None:
    """A byte-fallback decoder spoils the whole run of bytes, so a step would change the text."""
    table, end = _byte_alphabet(), tokenizer.inner.token_to_id("a")  # which is no byte
    is_fallback = tokenizer.inner.token_to_id("<unk>") is not None
    run = [*"é\n".encode(), 0xFF]
    ids = run if is_fallback else [tokenizer.inner.token_to_id(table[byte]) for byte in run]
    ids = [*ids, end, *ids, end]
    single, pairs, whole = (TextStream(tokenizer) for _ in range(3))
    for token in ids:
        single.extend_with([token])
    for start in range(0, len(ids), 2):
        pairs.extend_with(ids[start : start + 2])
    whole.extend_with(ids)
    assert single.final().startswith("é\n")
    assert single.final().endswith("a")
    assert pairs.final() == whole.final() == single.final()


def test_only_tokenizers_that_decode_plainly_are_called_directly(tokenizer: Any) -> None:
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *_: Any, **__: Any) -> str:
            return "own"

    assert decoder_of(Own(tokenizer_object=tokenizer.inner))([1]) == "own"
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner)
    plain.clean_up_tokenization_spaces = True
    assert decoder_of(plain)([2, 3]) == plain.decode([2, 3], skip_special_tokens=True)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = (chr(256 + i) for i in range(256))
    return {byte: chr(byte) if byte in keep else next(spare) for byte in range(256)}


TABLE = _byte_alphabet()


def test_stop_strings_and_what_is_held_back(tokenizer: Any) -> None:
    table = _byte_alphabet()
    is_fallback = tokenizer.inner.token_to_id("<unk>") is not None

    def ids(text: str) -> list[int]:
        if is_fallback:
            return list(text.encode())
        return [tokenizer.inner.token_to_id(table[byte]) for byte in text.encode()]

    stream = TextStream(tokenizer, ("END", "ENOUGH"))
    assert not stream.extend(ids("go on EN"))
    assert stream.safe_text() == "go on "
    assert not stream.extend(ids("go on ENX"))
    assert stream.safe_text() == "go on ENX"
    assert stream.extend(ids("go on ENX ENOUGH, yes"))
    assert stream.safe_text() == stream.final() == "go on ENX "
    again = stream.emptied()
    assert again.safe_text() == again.final() == "" and not again.extend(ids("go"))
    assert again.extend(ids("go on END")) and again.final() == "go on "
    assert stream.final() == "go on ENX "
    unfinished = TextStream(tokenizer, ("END",))
    unfinished.extend(ids("the EN"))
    assert unfinished.safe_text() == "the " and unfinished.final() == "the EN"
    begun = TextStream(tokenizer, ("END",))
    begun.extend(ids("EN"))
    assert begun.safe_text() == "" and begun.final() == "EN"


def test_a_stop_string_before_a_part_of_a_character_ends_at_once() -> None:
    """GPT-2's kind has tokens such as a space and the first byte of a character."""
    table = _byte_alphabet()
    tokens = [b" \xe2", b"\x80", b"a"]
    names = ["".join(table[byte] for byte in token) for token in tokens]
    inner = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    for given in (_Wrapped(inner), PreTrainedTokenizerFast(tokenizer_object=inner)):
        stream = TextStream(given, ("a ",))
        assert not stream.extend_with([2])
        assert stream.extend_with([0])
        assert stream.safe_text() == stream.final() == ""
