"""Keywords of JSON Schema that a grammar does not enforce are refused, all others served."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import xgrammar
from guided import EOS, VOCAB, save_tokenizer

from trtspec.guided.schema import find_in_tag, find_unenforced, find_unescaped, find_unread

INTEGER = {"type": "integer"}
UNESCAPED = [
    ('"', '"'), (r"\"", '"'), (r"\x22", '"'), (r"\u0022", '"'), (r"\u{22}", '"'), ('["]', '"'),
    ('(?:say "hi")', 'say "hi"'), (r"\\", "\\"), (r"[\\]", "\\"), (r"\x5c", "\\"),
    ("\t", "\t"), (r"\n", "\n"), (r"[\n]", "\n"), (r"\cA", "\x01"), (r"\0", "\0"), (r"[\b]", "\b"),
]  # fmt: skip
"""Patterns whose text must be escaped in JSON, and what XGrammar takes between the quotes."""
MISREAD = [
    (r"[\^a]", "b"), (r"[\u005ea]", "b"), (r"\x41b", "\u041b"), (r"[\x410]", "\u0410"),
    (r"\x4-", "\4-"), (r"[\p{L}]", "{"), (r"[\1]", "1"), (r"\h", "h"), (r"\x{2}", "xx"),
    (r"\u004", "u004"), (r"\012", "\x0012"), ("[^]a]{2}", "_a]]"),
]  # fmt: skip
"""Regular expressions, and texts that XGrammar takes but Python does not."""
READ_RIGHT = [
    (r"[a\^]", "^", "b"), (r"[^\^a]", "b", "^"), (r"\^b", "^b", "b"), (r"\x41-", "A-", "\u041d"),
    (r"\u0041b", "Ab", "\u041b"), (r"[\u0041b]", "A", "\u041b"), (r"[\b]", "\b", "b"),
    (r"\\x41b", "\\x41b", "Ab"), (r"\.\-\/", ".-/", "a"), (r"\0a", "\0a", "a"),
]  # fmt: skip
"""Regular expressions, a text that each matches and one that it does not."""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "[1, 1]"),
    ({"type": "array", "items": INTEGER, "contains": {"const": 3}}, "[1]"),
    ({"type": "integer", "not": {"const": 7}}, "7"),
    ({"allOf": [INTEGER, {"minimum": 9}]}, "7"),
    ({"type": "integer", "if": {"const": 7}, "then": False}, "7"),
    ({"type": "string", "minLength": 5, "pattern": "^[a-z]+$"}, '"abc"'),
    (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER},
         "dependentRequired": {"a": ["b"]}},
        '{"a": 1}',
    ),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["z"]}, '{"a": 1}'),
    ({"type": "integer", "enum": [1, "a"]}, '"a"'),
    ({"type": "integer", "anyOf": [{"minimum": 9}, {"maximum": 3}]}, "7"),
    ({"$defs": {"n": INTEGER}, "$ref": "#/$defs/n", "minimum": 9}, "7"),
    ({"$defs": {"n": INTEGER | {"$anchor": "n"}}, "$ref": "#n"}, '"a"'),
    ({"$ref": "https://example.com/integer.json"}, '"a"'),
    ({"patternProperties": {"^a$": INTEGER}}, '{"a": "x"}'),
    ({"propertyNames": {"enum": ["a"]}}, '{"b": 1}'),
    ({"minProperties": 1}, "{}"),
    ({"required": [], "maxProperties": 0}, '{"a": 1}'),
    (
        {"type": "object", "properties": {"a": INTEGER}, "propertyNames": {"enum": ["b"]}},
        '{"a": 1}',
    ),
    ({"type": "integer", "multipleOf": 1025}, "7"),
    ({"type": "integer", "multipleOf": 2.5}, "7"),
    *(({"type": "string", "pattern": pattern}, f'"{raw}"') for pattern, raw in UNESCAPED),
    ({"type": "object", "patternProperties": {'a"': INTEGER}}, '{"a"": 1}'),
    ({"type": "object", "propertyNames": {"pattern": 'a"'}}, '{"a"": 1}'),
]  # fmt: skip
SERVED: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": 5}, "4"),
    ({"type": "integer", "exclusiveMinimum": 7}, "7"),
    ({"type": "integer", "multipleOf": 5}, "7"),
    ({"type": "string", "pattern": "^b$"}, '"abc"'),
    ({"type": "string", "minLength": 5}, '"abc"'),
    ({"type": "string", "format": "date"}, '"abc"'),
    ({"type": "array", "items": INTEGER, "minItems": 2}, "[1]"),
    ({"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False}, "[1, 2]"),
    ({"type": ["integer", "null"]}, '"a"'),
    ({"type": "string", "enum": ["a", "b"]}, '"c"'),
    ({"const": {"a": 1}}, '{"a": 2}'),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, "{}"),
    ({"anyOf": [INTEGER, {"type": "null"}], "description": "either"}, '"a"'),
    ({"type": "object", "patternProperties": {"^b$": INTEGER}}, '{"a": 1}'),
    ({"$defs": {"n": INTEGER}, "type": "array", "items": {"$ref": "#/$defs/n"}}, '["a"]'),
    ({"anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#"}}]}, '["a"]'),
    ({"type": "integer", "multipleOf": 1024}, "7"),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, '{"b": 1}'),
    ({"additionalProperties": INTEGER, "minProperties": 1}, "{}"),
    ({"properties": {"a": INTEGER}, "maxProperties": 0}, '{"a": 1}'),
    (
        {"properties": {"a": INTEGER}, "patternProperties": {"^b$": INTEGER}},
        '{"b": "x"}',
    ),
    *(
        ({"type": "string", "pattern": pattern}, f'"{raw}"')
        for pattern in ("[\"']", r"[^\\]", r"[^\"]*", r"[ -\\]", r"[\t-~]", ".", r"\S", r"\/[\]]")
        for raw in ('"', "\\", "\t")
    ),
]


@pytest.fixture(scope="module")
def accepts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB, stop_token_ids=EOS)
    compiler = xgrammar.GrammarCompiler(info)

    def accepts(schema: dict[str, Any], text: str) -> bool:
        compiled = compiler.compile_json_schema(schema)
        matcher = xgrammar.GrammarMatcher(compiled)
        return bool(matcher.accept_string(text) and matcher.is_completed())

    return accepts


@pytest.mark.parametrize(("schema", "text"), REFUSED, ids=str)
def test_what_a_grammar_ignores_is_refused(accepts: Any, schema: dict[str, Any], text: str) -> None:
    """The texts do not fit, and XGrammar takes them."""
    assert accepts(schema, text)
    assert find_unenforced(schema) is not None
    nested = {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}
    assert "#/items/anyOf/1" in str(find_unenforced(nested))


@pytest.mark.parametrize(("schema", "text"), SERVED, ids=str)
def test_what_a_grammar_enforces_is_served(accepts: Any, schema: dict[str, Any], text: str) -> None:
    assert not accepts(schema, text)
    assert find_unenforced(schema) is None


@pytest.fixture(scope="module")
def matches() -> Any:
    letters = [bytes([byte]) for byte in range(256)]
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo([*letters, "</s>"], stop_token_ids=256)
    )

    def matches(pattern: str, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiler.compile_regex(pattern))
        return bool(matcher.accept_string(text) and matcher.is_completed())

    return matches


@pytest.mark.parametrize(("pattern", "text"), MISREAD)
def test_what_is_misread_in_a_regex_is_refused(matches: Any, pattern: str, text: str) -> None:
    with suppress(re.error):
        assert re.fullmatch(pattern, text) is None
    assert matches(pattern, text)
    assert find_unread(pattern) is not None
    assert find_unenforced({"type": "string", "pattern": pattern}) is not None
    assert find_in_tag({"format": {"type": "regex", "pattern": pattern}}) is not None


@pytest.mark.parametrize(("pattern", "right", "wrong"), READ_RIGHT)
def test_what_is_read_in_a_regex_is_served(
    matches: Any, pattern: str, right: str, wrong: str
) -> None:
    for text in (right, wrong):
        assert matches(pattern, text) == (re.fullmatch(pattern, text) is not None)
    assert matches(pattern, right) and find_unread(pattern) is None


@pytest.mark.parametrize("pattern", [r"\ud83d\ude00", r"[\uD83D]", "a\\"])
def test_what_is_no_character_is_refused(pattern: str) -> None:
    assert find_unread(pattern) is not None


def test_names_of_properties_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"not": INTEGER, "if": INTEGER}, "required": ["not"]}
    assert find_unenforced(schema) is None
    assert find_unenforced({"enum": [{"not": 1}, {"uniqueItems": True}]}) is None


def test_a_character_beyond_unicode_needs_no_escape() -> None:
    """XGrammar says what is wrong with it."""
    assert find_unescaped(r"\u{110000}") is None


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        ("^ab$", None), ("(?:ab)", None), ("a?=b", None), (r"a\$b\^", None), ("a^b", '"^"'),
        ("a$b", '"$"'),
        ("a(?=b)", '"(?="'), ("a(?!b)", '"(?!"'), ("(?<a)b", '"(?<"'), (r"a\bc", r'"\b"'),
        # In a class these are characters, up to its end.
        ("[ab^$]c", None), ("[ab(?=]c", None), (r"[a\]$]c", None), (r"[a\b]c", None),
        ("[ab]$c", '"$"'), ("[ab](?=c)", '"(?="'), (r"[ab]\bc", r'"\b"'),
    ],
)  # fmt: skip
def test_anchors_and_look_arounds_are_found(text: str, unread: str | None) -> None:
    found = find_unread(text)
    assert found is None if unread is None else found is not None and found.startswith(unread)
