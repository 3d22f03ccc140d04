"""One request's grammar: rows of masks against brute force, states ahead and back."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guided import EOS, LANGUAGES, VOCAB, Language, allowed, of_regex, save_tokenizer, token_texts
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from trtspec import GuidedDecodingParams
from trtspec.errors import RequestError
from trtspec.guided.compiler import GrammarCompiler
from trtspec.guided.grammar import MAX_WHITE_SPACE, Grammar, Masks, WhiteSpace, Without
from trtspec.ops.tokens.bitmask import mask_logits


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return GrammarCompiler(tokenizer, VOCAB, [EOS])


def make(compiler: GrammarCompiler, params: GuidedDecodingParams, prompt: Any = ()) -> Grammar:
    return compiler.compile(params, [EOS], prompt).future.result(30)


def tokens_of(masks: Masks | torch.Tensor) -> list[list[int]]:
    """The tokens that each row allows."""
    return [[t for t in range(VOCAB) if row[t // 32] >> (t % 32) & 1] for row in masks.tolist()]


def new_masks(rows: int) -> Masks:
    return np.random.default_rng(0).integers(
        -(2**31), 2**31 - 1, (rows, (VOCAB + 31) // 32), dtype=np.int32
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "language",
    [*LANGUAGES, of_regex(r"[abc]{2,9}")],  # of the last a text may end, and may go on
    ids=lambda language: language.params.kind,
)
def test_rows_after_drafts(compiler: GrammarCompiler, language: Language) -> None:
    """Random texts of the language with random drafts, right and wrong."""
    rng, texts = random.Random(1), token_texts()
    for _ in range(20):
        grammar, output = make(compiler, language.params), []
        while len(output) < 14 and EOS not in output:
            text = "".join(texts[t] for t in output)
            drafts, rows = [], [sorted(allowed(language, text))]
            for _ in range(4):  # a draft that is not allowed, or -1, repeats the last row
                draft = rng.choice(rows[-1]) if rng.random() < 0.8 else rng.randrange(-1, VOCAB)
                drafts.append(draft)
            ahead, are_read = text, list[bool]()
            for draft in drafts:
                are_read.append(all(are_read) and draft in rows[-1] and draft != EOS)
                if are_read[-1]:
                    ahead += texts[draft]
                    rows.append(sorted(allowed(language, ahead)))
                else:
                    rows.append(rows[-1])
            masks = new_masks(7)
            before = masks.copy()
            grammar.fill(masks, 1, drafts)
            assert tokens_of(masks[1:6]) == rows
            assert (masks[[0, 6]] == before[[0, 6]]).all()
            grammar.come_back()
            for row in rows:
                one = new_masks(1)
                grammar.fill_row(one, 0)
                assert tokens_of(one) == [row]
                if drafts:
                    assert grammar.go_ahead(drafts.pop(0)) == are_read.pop(0)
            token = rng.choice(rows[0])
            grammar.follow([token])
            output.append(token)
        assert grammar.tokens == output and not grammar.is_broken
        assert grammar.is_complete == (EOS in output)


@pytest.fixture(scope="module")
def bytes_tokenizer() -> Tokenizer:
    """One token is a byte; the last ends a text."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.fixture(scope="module")
def accepts(bytes_tokenizer: Tokenizer) -> Any:
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_tokenizer)
    compiler = GrammarCompiler(fast, 257, [256])

    def accepts(params: GuidedDecodingParams, text: str) -> bool:
        ids = bytes_tokenizer.encode(text).ids
        assert len(ids) == len(text.encode())
        grammar = compiler.compile(params, [256], ()).future.result(30)
        return grammar.follow([*ids, 256]) == len(ids) + 1 and not grammar.is_broken

    return accepts


def test_choices_of_any_characters(accepts: Any) -> None:
    """The flag of England has tag characters, which are not printable."""
    flag = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
    for text in (flag, "\01", "\x7f\u200b", "\U0010ffff", '\\u0041"\n', "\ue0001"):
        assert accepts(GuidedDecodingParams(choice=[text]), text), ascii(text)


@pytest.mark.parametrize(
    "pattern",
    [".+", "a.+", ".{2,}", "[^,]+|b", r"\S+", "[^/]+/[^/]+", "[^/]+(/[^/]+)*", "[^/][^/]*/[^/]+"],
)
def test_a_text_ends_where_it_matches(accepts: Any, pattern: str) -> None:
    """Classes beyond ASCII, repeated up to the end: XGrammar 0.2.9 ended them early."""
    for text in ("", "a", "aa", "/", "a/", "a/a", "é", "é/é", "aé"):
        matches = re.fullmatch(pattern, text) is not None
        assert accepts(GuidedDecodingParams(regex=pattern), text) == matches, text


def test_an_xgrammar_that_ends_texts_early_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not compiler._ends_too_early
    monkeypatch.setitem(vars(compiler), "_ends_too_early", True)
    for params in (GuidedDecodingParams(regex=".+"), GuidedDecodingParams(grammar='root ::= "a"')):
        with pytest.raises(RequestError, match="lets outputs end before they match"):
            make(compiler, params)
    make(compiler, GuidedDecodingParams(json={"type": "integer"}))
    make(compiler, GuidedDecodingParams(choice=["a"]))


@pytest.mark.parametrize("length", [{"minLength": 1}, {"maxLength": 3}])
def test_texts_of_a_length_are_json(accepts: Any, length: dict[str, int]) -> None:
    """Their characters are JSON's, also in the name of a property and within a tag."""
    text = {"type": "string", **length}
    record = {"type": "object", "properties": {"a": text, "n": {"minimum": 5, "type": "integer"}}}
    content = {"type": "json_schema", "json_schema": text}
    form = {"type": "tag", "begin": "<", "content": content, "end": ">"}
    for params, before, after in (
        (GuidedDecodingParams(json=text), "", ""),
        (GuidedDecodingParams(json=record), '{"a":\t', ', "n": 7}'),
        (GuidedDecodingParams(json={"type": "object", "propertyNames": text}), "{", ": 1}"),
        (GuidedDecodingParams(structural_tag={"type": "structural_tag", "format": form}), "<", ">"),
    ):
        for inside in ["a", "é😀", "\x7f", *map(chr, range(32))]:
            is_json = ord(inside[0]) >= 32  # as json.loads has it
            assert accepts(params, f'{before}"{inside}"{after}') == is_json, ascii(inside)
    assert not accepts(GuidedDecodingParams(json=text), '""' if "minLength" in length else '"abcd"')
    assert not accepts(GuidedDecodingParams(json=record), '{"a": "b", "n": 4}')


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "json-pointer",
            ["", "/a/é.b", "/a~0/[{}]", *(f"/{chr(c)}" for c in [*range(32), 34, 92])],
        ),
        (
            "relative-json-pointer",
            ["0", "1/a", "2#", *(f"0/{chr(c)}" for c in [*range(32), 34, 92])],
        ),
        ("email", ["a@b.cd", r"\"a b\"@c", r"\"\\ab\"@c", r"\"\ab\"@c", r"\"\u\"@c"]),
    ],
)
def test_texts_of_a_format_are_json(accepts: Any, name: str, texts: list[str]) -> None:
    params = GuidedDecodingParams(json={"type": "string", "format": name})
    for text in texts:
        try:
            json.loads(f'"{text}"')
        except json.JSONDecodeError:
            assert not accepts(params, f'"{text}"'), ascii(text)
        else:
            assert accepts(params, f'"{text}"'), ascii(text)


def test_a_length_in_a_tag_leaves_other_parts_alone(accepts: Any) -> None:
    """A regular expression beside it may have what no JSON text has."""
    text = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}}
    elements = [{"type": "const_string", "value": "email "},
                {"type": "regex", "pattern": r'[^"\\\r\n]\\[ -~]'}, text]  # fmt: skip
    form = {"type": "sequence", "elements": elements}
    params = GuidedDecodingParams(structural_tag={"type": "structural_tag", "format": form})
    assert accepts(params, 'email \t\\a"b"')
    assert not accepts(params, 'email \t\\a"\t"')


def test_a_length_whose_keyword_is_escaped(accepts: Any) -> None:
    params = GuidedDecodingParams(json='{"type": "string", "max\\u004cength": 3}')
    assert accepts(params, '"abc"') and not accepts(params, '"abcd"')
    assert not accepts(params, '"a\t"')


def test_tags_of_tokens_with_texts_of_a_length(compiler: GrammarCompiler) -> None:
    """Tokens are named as the tokenizer names them."""
    content = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 3}}
    quote, a = (token_texts().index(text) for text in '"a')
    for first in ({"type": "token", "token": "<s>"}, {"type": "any_tokens"}):
        form = {"type": "sequence", "elements": [first, content]}
        params = GuidedDecodingParams(structural_tag={"type": "structural_tag", "format": form})
        assert make(compiler, params).follow([1, quote, a, quote, EOS]) == 5


def test_restarting(compiler: GrammarCompiler) -> None:
    texts = token_texts()
    params = GuidedDecodingParams(regex="[cd]{2,9}", reasoning_end=[10, 11])
    grammar, masks = make(compiler, params), new_masks(1)
    output = [5, 10, 10, 11, texts.index("c"), texts.index("d"), texts.index("c"), EOS]
    rows = []
    for token in output:
        grammar.fill(masks, 0, [])
        rows.append(tokens_of(masks)[0])
        grammar.follow([token])
    assert grammar.is_complete
    for length in (7, 6, 4, 3, 2, 0):
        grammar.go_ahead(3)
        grammar.restart(output[:length])
        grammar.fill(masks, 0, [])
        assert tokens_of(masks)[0] == rows[length]
        grammar.follow(output[length:])
        assert grammar.is_complete


@pytest.mark.parametrize(
    "text", ['a"b\\c', "a\n\r\t\x07b", "a\u2028b", "a\U000e0041b", "a\U0010ffff"]
)
def test_a_choice_may_have_any_character(compiler: GrammarCompiler, text: str) -> None:
    """What is not printable is escaped. U+E0041 was taken for U+E004 and a "1"."""
    grammar = make(compiler, GuidedDecodingParams(choice=[text]))
    assert grammar.matcher.accept_string(text)
    assert not grammar.matcher.accept_string("a")


def test_before_the_marker_all_but_the_end_may_come(compiler: GrammarCompiler) -> None:
    params = GuidedDecodingParams(choice=["c"], reasoning_end=[10, 11])
    grammar, masks = make(compiler, params), new_masks(5)
    grammar.fill(masks, 0, [10, 10, 11, token_texts().index("c")])
    free = [t for t in range(VOCAB) if t != EOS]
    c = [token_texts().index("c")]
    assert tokens_of(masks) == [free, free, free, c, [EOS]]
    grammar.fill(masks, 0, [11, EOS, 10, 11])  # the half of a marker is none, and no end comes
    assert tokens_of(masks) == [free] * 5
    grammar.follow([11, EOS])
    assert grammar.is_broken


@pytest.mark.parametrize(
    ("prompt", "is_over"), [([7, 10, 11], True), ([10, 11, 7], False), ([10], False), ([], False)]
)
def test_a_prompt_may_end_the_reasoning(
    compiler: GrammarCompiler, prompt: list[int], is_over: bool
) -> None:
    params = GuidedDecodingParams(choice=["c"], reasoning_end=[10, 11])
    grammar, masks = make(compiler, params, prompt), new_masks(1)
    grammar.fill(masks, 0, [])
    assert (len(tokens_of(masks)[0]) == 1) == is_over


def test_special_tokens_stand_for_no_text(compiler: GrammarCompiler) -> None:
    """Their spelling is text that a grammar might allow."""
    grammar, masks = make(compiler, GuidedDecodingParams(regex="[^b]*")), new_masks(1)
    grammar.fill(masks, 0, [])
    assert {0, 1}.isdisjoint(tokens_of(masks)[0]) and len(tokens_of(masks)[0]) > 50


def test_special_tokens_that_a_tokenizer_flags_and_does_not_name(tmp_path: Path) -> None:
    """Llama 3's has such. No text is theirs either, and they may end a text."""
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("zz", special=True)])
    flagged = token_texts().index("zz")
    assert flagged not in tokenizer.all_special_ids
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS])
    grammar, masks = make(compiler, GuidedDecodingParams(regex="[^b]*")), new_masks(1)
    grammar.fill(masks, 0, [])
    assert flagged not in tokens_of(masks)[0] and len(tokens_of(masks)[0]) > 50
    assert compiler.ends_of([flagged, 40]) == [EOS, flagged]


@pytest.mark.parametrize("tokens", [[], [31], [5, 63, 64], [1, 40, 41, 95, 130], [0, 70, 20_000]])
def test_tokens_are_taken_out_of_one_row(tokens: list[int]) -> None:
    masks = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, (3, 640), dtype=np.int32)
    bits = masks[:, :, None] >> np.arange(32) & 1
    bits.reshape(3, -1)[1, tokens] = 0
    Without.of(tokens).narrow(masks, 1)
    assert (masks[:, :, None] >> np.arange(32) & 1 == bits).all()


def test_masks_of_a_draft_vocabulary() -> None:
    """Bits are looked up by the target's token; the last word is not full."""
    torch.manual_seed(0)
    masks, d2t = torch.from_numpy(new_masks(3)), torch.arange(40) * 2 % 57
    kept = tokens_of(masks)
    for table, size in ((None, VOCAB), (d2t, 40)):
        logits = torch.randn(3, size)
        masked = mask_logits(logits, masks, table)
        for row in range(3):
            for entry in range(size):
                token = entry if table is None else entry + int(table[entry])
                wanted = logits[row, entry] if token in kept[row] else -torch.inf
                assert masked[row, entry] == wanted


def test_threads_end_with_their_compiler(tmp_path: Path) -> None:
    import threading

    def count() -> int:
        return sum(thread.name == "trtspec-grammar" for thread in threading.enumerate())

    before = count()
    compiler = GrammarCompiler(save_tokenizer(tmp_path), VOCAB, [EOS])
    make(compiler, GuidedDecodingParams(choice=["c"]))
    make(compiler, GuidedDecodingParams(choice=["c"]))
    assert count() == before + 2
    del compiler
    deadline = time.monotonic() + 10
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() == before


@pytest.mark.parametrize("space", [" ", "\n"])
def test_white_space_between_values_is_limited(compiler: GrammarCompiler, space: str) -> None:
    """Not inside of a text, which may hold as many blanks as it likes."""
    texts = token_texts()
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    grammar, masks = make(compiler, GuidedDecodingParams(json=schema)), new_masks(1)
    blank = texts.index(space)
    grammar.follow([texts.index("{")])
    for count in range(MAX_WHITE_SPACE + 1):
        grammar.fill(masks, 0, [])
        assert (blank in tokens_of(masks)[0]) == (count < MAX_WHITE_SPACE)
        if count < MAX_WHITE_SPACE:
            grammar.follow([blank])
    assert tokens_of(masks)[0] == [texts.index('"')]
    inside = make(compiler, GuidedDecodingParams(json=schema))
    inside.follow([texts.index(c) for c in '{"a":"'] + [texts.index(" ")] * MAX_WHITE_SPACE)
    inside.fill(masks, 0, [])
    assert not inside.is_broken and texts.index(" ") in tokens_of(masks)[0]


def test_white_space_is_counted_in_characters_from_the_end() -> None:
    space = WhiteSpace({3: 1, 4: 8}, line_break=3, others=Without.of([3, 4]))
    for before in ([], [9], [4, 4, 4, 4, 4, 9]):  # there may be nothing else
        assert not space.has_enough(before) and not space.has_enough([*before, 3])
        assert not space.has_enough([*before, 4, 4, 4, 4] + [3] * 7)
        assert space.has_enough([*before, 4, 4, 4, 4] + [3] * 8)
