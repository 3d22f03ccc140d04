"""Tool calls in streamed text, in every format, whole or in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from guided import save_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.frontend.marked_tokenizer import keep_markers
from trtspec.frontend.outputs import Piece
from trtspec.serving.chat import ChatEndpoint, Choice
from trtspec.serving.tool_calls import Content, ToolCallDelta, ToolCallParser
from trtspec.serving.tool_formats import (
    ARGUMENT_TAGS,
    DEEPSEEK,
    FUNCTION_TAGS,
    GEMMA,
    HERMES,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    Format,
    format_of,
)
from trtspec.serving.tool_syntax import deepseek_marker

FORMATS = (
    HERMES, FUNCTION_TAGS, ARGUMENT_TAGS, MISTRAL, LLAMA, DEEPSEEK, KIMI, MINIMAX, GEMMA,
)  # fmt: skip
CALLS_BEGIN, CALLS_END, BEGIN, END, SEP = map(
    deepseek_marker,
    ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep"),
)
Result = tuple[str, list[tuple[str, Any]]]


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return json.dumps(value)


def tag_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def written(form: Format, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """How a model of that family writes calls."""
    texts = []
    for number, (name, arguments) in enumerate(calls):
        body = json.dumps(arguments, ensure_ascii=False)
        named = f'{{"name": "{name}", "arguments": {body}}}'
        if form is HERMES:
            texts.append(f"<tool_call>\n{named}\n</tool_call>")
        elif form is FUNCTION_TAGS:
            pairs = "".join(
                f"<parameter={k}>\n{tag_value(v)}\n</parameter>\n" for k, v in arguments.items()
            )
            texts.append(f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>")
        elif form is ARGUMENT_TAGS:
            pairs = "".join(
                f"<arg_key>{k}</arg_key>\n<arg_value>{tag_value(v)}</arg_value>\n"
                for k, v in arguments.items()
            )
            texts.append(f"<tool_call>{name}\n{pairs}</tool_call>")
        elif form is MISTRAL:
            texts.append(f"[TOOL_CALLS]{name}[ARGS]{body}")
        elif form is LLAMA:
            texts.append(named.replace("arguments", "parameters", 1))
        elif form is DEEPSEEK:
            fenced = f"function{SEP}{name}\n```json\n{body}\n```"
            texts.append(BEGIN + (fenced if number % 2 else f"{name}{SEP}{body}") + END)
        elif form is KIMI:
            texts.append(
                f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
                f"{body}<|tool_call_end|>"
            )
        elif form is MINIMAX:
            pairs = "".join(
                f'<parameter name="{k}">{tag_value(v)}</parameter>\n' for k, v in arguments.items()
            )
            texts.append(f'<invoke name="{name}">\n{pairs}</invoke>')
        else:
            texts.append(f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>")
    if form is LLAMA:
        return "; ".join(texts)
    if form is DEEPSEEK:
        return CALLS_BEGIN + "\n".join(texts) + CALLS_END
    if form is KIMI:
        return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"
    if form is MINIMAX:
        return "<minimax:tool_call>\n" + "\n".join(texts) + "\n</minimax:tool_call>"
    return "\n".join(texts)


def parsed(
    form: Format, pieces: list[str], tools: list[Any] | None = None, is_cut: bool = False
) -> Result:
    parser = ToolCallParser(form, tools or [])
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish(is_cut)
    text = "".join(e.text for e in events if isinstance(e, Content))
    deltas = [e for e in events if isinstance(e, ToolCallDelta)]
    assert [delta.index for delta in deltas] == list(range(len(deltas)))
    return text, [(delta.name, json.loads(delta.arguments)) for delta in deltas]


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]


plain = st.text(st.characters(codec="utf-8", exclude_characters='<>[]{}"|\\`&;:,'), max_size=12)
inner = plain.map(str.strip)
# Tags hold strings as they are: one that reads as JSON is another value without a schema.
strings = inner.filter(lambda s: not s or s[0] not in "-0123456789tfn")
numbers = st.integers(-(10**9), 10**9) | st.booleans() | st.just(None)
values = strings | numbers | st.lists(numbers | strings, max_size=3)
names = st.from_regex(r"[a-z_]{1,10}", fullmatch=True)
some_calls = st.lists(
    st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3
)
places = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@given(calls=some_calls, before=plain, after=plain, places=places)
@settings(max_examples=40, deadline=None)
def test_calls_are_found_in_any_pieces(
    form: Format, calls: Any, before: str, after: str, places: list[int]
) -> None:
    text = before + written(form, calls) + after
    if form is LLAMA:  # a call in the middle of an answer is part of it
        text = written(form, calls) + after
    whole = parsed(form, [text])
    assert parsed(form, cut(text, places)) == whole
    assert whole[1] == calls
    rest = after if form is LLAMA else before.rstrip() + after
    assert "".join(whole[0].split()) == "".join(rest.split())
    assert parsed(form, list(text)) == whole


PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', '{"a": "b', '"}', "}", "{",
    "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "f", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "{}", ";", "\n",
    "<|python_tag|>", '{"name": "f", "parameters": {"x": 1}}', CALLS_BEGIN, CALLS_END, BEGIN, END,
    SEP, "function", "[", "```json\n{}\n```", "<|tool_call>", "call:f{", '<|"|>', "<tool_call|>",
    "x:1", ",", "<", "[{", "}]", "\\", " ", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@given(text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join), places=places)
@settings(max_examples=120, deadline=None)
def test_nonsense_gives_the_same_in_any_pieces_and_is_not_lost(
    form: Format, text: str, places: list[int]
) -> None:
    whole = parsed(form, [text])
    assert parsed(form, cut(text, places)) == whole == parsed(form, list(text))
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> and more'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>["f"]</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "f", "argu'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call> y"}}'),  # no other end
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {"[" * 90_000}</tool_call>'),
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {{"n": {"9" * 5000}}}}}</tool_call>'),
        (FUNCTION_TAGS, "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>"),
        (FUNCTION_TAGS, "<function=f and more text"),
        (ARGUMENT_TAGS, "<tool_call>f\n<arg_key>x</arg_key></tool_call>"),
        (MISTRAL, "[TOOL_CALLS] I shall call nothing."),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"nam": 1}]'),
        (LLAMA, '{"name": "Ann", "age": 7}'),
        (LLAMA, '<|python_tag|>brave_search.call(query="x")'),
        (DEEPSEEK, f"{CALLS_BEGIN}{BEGIN}f{SEP}{{]{END}{CALLS_END}"),
        (KIMI, "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
        (MINIMAX, '<minimax:tool_call><invoke name="f"><parameter name="x">1</invoke>'),
        (MINIMAX, '<minimax:tool_call>\n<invoke name="f" and more text'),
        (MINIMAX, "<minimax:tool_call></minimax:tool_call>"),
        (MINIMAX, 'Write <invoke name="f"><parameter name="x">1</parameter></invoke>.'),
        (
            MINIMAX,
            '<minimax:tool_call><invoke name="f"><parameter name="s"><invoke name="g">'
            '<parameter name="x">2</parameter></invoke></parameter></invoke></minimax:tool_call>',
        ),
        (GEMMA, "<|tool_call>call:f{x:}<tool_call|>"),
        (GEMMA, "<|tool_call>call:f{x:" + "[" * 5000 + "<tool_call|>"),
    ],
)
def test_a_malformed_call_is_text(form: Format, text: str) -> None:
    assert parsed(form, [text]) == (text, [])


def test_a_right_call_after_a_malformed_one_is_found() -> None:
    bad, good = '<tool_call>{"name": "f</tool_call>', '<tool_call>{"name": "g"}</tool_call>'
    assert parsed(HERMES, [f"{bad}\n{good}"]) == (bad, [("g", {})])
    assert parsed(MISTRAL, ['[TOOL_CALLS]{ [TOOL_CALLS]g{"x": 1}'])[1] == [("g", {"x": 1})]


def test_an_end_marker_inside_a_value_belongs_to_it() -> None:
    code = "print('</tool_call>')"
    text = f'<tool_call>{{"name": "run", "arguments": {{"code": "{code}"}}}}</tool_call>done'
    assert parsed(HERMES, list(text)) == ("done", [("run", {"code": code})])
    text = f"<tool_call><function=run><parameter=code>\n{code}\n</parameter></function></tool_call>"
    assert parsed(FUNCTION_TAGS, list(text)) == ("", [("run", {"code": code})])
    code = "</invoke></minimax:tool_call>"
    text = f'<minimax:tool_call><invoke name="run"><parameter name="code">{code}</parameter>'
    text += "</invoke></minimax:tool_call>"
    assert parsed(MINIMAX, list(text)) == ("", [("run", {"code": code})])
    for form in (DEEPSEEK, KIMI):
        calls = [("run", {"code": f"a {form.inner[0]} b"})]
        assert parsed(form, list(written(form, calls))) == ("", calls)
    text = '<|tool_call>call:run{code:<|"|>a, {b} <tool_call|><|"|>}<tool_call|>'
    assert parsed(GEMMA, list(text)) == ("", [("run", {"code": "a, {b} <tool_call|>"})])


@pytest.mark.parametrize("form", [MISTRAL, LLAMA], ids=lambda f: f.name)
def test_an_escaped_quote_does_not_end_its_text(form: Format) -> None:
    """Also where its backslash is the last character that has come."""
    calls = [("f", {"a": 'x"}y'}), ("f", {"a": "x\\"})]
    text = written(form, calls)
    assert parsed(form, list(text)) == parsed(form, [text]) and parsed(form, [text])[1] == calls


@pytest.mark.parametrize(
    "form", [HERMES, FUNCTION_TAGS, ARGUMENT_TAGS, DEEPSEEK, KIMI, MINIMAX, GEMMA]
)
def test_a_last_call_without_its_end_marker_counts(form: Format) -> None:
    calls = [("f", {"x": 1})]
    text = written(form, calls)
    for marker in (*form.wrappers, *form.inner[:1]):
        text = text.rstrip().removesuffix(marker)
    assert parsed(form, [text]) == ("", calls)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_a_call_that_the_token_limit_cuts_is_text(form: Format) -> None:
    """Not a call with some of its arguments, or of a function whose name begins like its own."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("delete", "delete_old")
    ]
    calls = [("delete", {"path": "/a b"}), ("delete_old", {"path": "/c", "keep": "d"})]
    text = written(form, calls)
    numbers = []
    for end in range(len(text)):
        said, found = parsed(form, [text[:end]], tools, is_cut=True)
        assert found == calls[: len(found)], text[:end]
        if not found:
            assert said.strip() in text[:end]
        numbers.append(len(found))
    assert numbers == sorted(numbers) and {0, 1} <= {*numbers}
    assert parsed(form, [text], tools, is_cut=True)[1] == calls


@pytest.mark.parametrize(("reason", "is_call"), [("length", False), ("stop", True)])
def test_why_an_answer_ended_says_whether_its_last_call_is_whole(
    reason: str, is_call: bool
) -> None:
    choice = Choice(None, ToolCallParser(ARGUMENT_TAGS), None, is_named=False, ends_at_call=False)
    delta = choice.take(Piece("<tool_call>delete", [1], None, None, reason))
    assert [call.name for call in delta.calls] == ["delete"] * is_call
    assert delta.content == ("" if is_call else "<tool_call>delete")


@pytest.mark.parametrize(
    "text",
    [
        "<invoke name='f'><parameter name='x'>1</parameter></invoke>",
        '<invoke name=f >\n<parameter name="x" type="integer">\n1\n</parameter>\n</invoke>\n',
        '<invoke name="f"><parameter name="x">1</parameter>',
    ],
)
def test_other_ways_of_minimax(text: str) -> None:
    whole = f"<minimax:tool_call>{text}</minimax:tool_call>"
    assert parsed(MINIMAX, list(whole)) == ("", [("f", {"x": 1})])


@pytest.mark.parametrize(
    ("form", "value"),
    [
        (HERMES, '{"name": "f", "arguments": {"x": "'),
        (FUNCTION_TAGS, "<function=f><parameter=x>"),
        (ARGUMENT_TAGS, "f<arg_key>x</arg_key><arg_value>"),
        (KIMI, 'functions.f:0<|tool_call_argument_begin|>{"x": "'),
        (MINIMAX, '<invoke name="f"><parameter name="x">'),
    ],
)
def test_a_block_of_end_markers_is_given_up(form: Format, value: str) -> None:
    """Each of them may be a value's, so each is tried: without an end to it that took minutes."""
    text = next(iter(form.readers)) + value + 3000 * form.inner[0]
    parser = ToolCallParser(form, [])
    assert parser.feed(text) == [Content(text)]  # before the answer's end


def test_mistrals_older_forms() -> None:
    listed = '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]'
    (delta,) = ToolCallParser(MISTRAL).feed(listed)
    assert delta == ToolCallDelta(0, "f", '{"x": 1}', "abcdefghi")
    (delta,) = ToolCallParser(MISTRAL).feed('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x": 1}')
    assert delta == ToolCallDelta(0, "f", '{"x": 1}', "abc")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "zip": {"type": "string"},
                    "n": {"type": "integer"},
                    "any": {},
                    "unit": {"type": "string", "enum": ["C", " F "]},
                    "or": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "two": {"type": ["integer", "string"]},
                },
            },
        },
    }
]


@pytest.mark.parametrize("form", [FUNCTION_TAGS, ARGUMENT_TAGS, MINIMAX], ids=lambda f: f.name)
def test_values_in_tags_have_the_types_of_the_schema(form: Format) -> None:
    text = written(form, [("f", {"zip": "01234", "n": 7, "any": [1], "no": "x"})])
    expected = {"zip": "01234", "n": 7, "any": [1], "no": "x"}
    assert parsed(form, [text], TOOLS) == ("", [("f", expected)])
    text = written(form, [("f", {"zip": '"quoted"', "n": "many"})])
    assert parsed(form, [text], TOOLS)[1] == [("f", {"zip": '"quoted"', "n": "many"})]


@pytest.mark.parametrize("form", [FUNCTION_TAGS, ARGUMENT_TAGS, MINIMAX], ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("unit", " C ", "C"),
        ("unit", " F ", " F "),
        ("zip", " C ", " C "),
        ("or", "12", "12"),
        ("or", "null", None),
        ("or", "nothing", "nothing"),
        ("two", "12", 12),
        ("two", "true", "true"),
    ],
)
def test_plain_text_is_of_a_type_that_the_schema_allows(
    form: Format, name: str, text: str, value: Any
) -> None:
    assert parsed(form, [written(form, [("f", {name: text})])], TOOLS)[1] == [("f", {name: value})]


@pytest.mark.parametrize("schema", [{"type": 5, "enum": 5, "anyOf": 5}, {"type": [[]]}, 5])
def test_a_schema_of_nonsense_does_no_harm(schema: Any) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}
    text = written(FUNCTION_TAGS, [("f", {"x": 7})])
    assert parsed(FUNCTION_TAGS, [text], [{"function": function}])[1] == [("f", {"x": 7})]


def test_a_call_of_another_function_is_text() -> None:
    text = written(HERMES, [("g", {})])
    assert parsed(HERMES, [text], TOOLS) == (text, [])
    assert parsed(HERMES, [text]) == ("", [("g", {})])


def test_half_a_surrogate_pair_can_be_sent() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "\\ud800é"}}</tool_call>'
    (delta,) = ToolCallParser(HERMES).feed(text)
    assert isinstance(delta, ToolCallDelta)
    assert delta.arguments.encode() and json.loads(delta.arguments) == {"x": "\ud800é"}
    text = '<tool_call>{"name": "f", "arguments": {}, "id": "\\ud800"}</tool_call>'
    (delta,) = ToolCallParser(HERMES).feed(text)
    assert isinstance(delta, ToolCallDelta) and delta.id is None  # the server makes one


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('<tool_call>\\n{"name": <function-name>, "arguments": <args>}\\n</tool_call>', HERMES),
        ("<tool_call>\\n<function=example>\\n<parameter=one>\\n</function>", FUNCTION_TAGS),
        ("<tool_call>{function-name}\\n<arg_key>k</arg_key>", ARGUMENT_TAGS),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' }}", MISTRAL),
        ('<|start_header_id|>{"name": function name, "parameters": dictionary}', LLAMA),
        (f"{CALLS_BEGIN}{BEGIN}' + tool['type']", DEEPSEEK),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", KIMI),
        ('<minimax:tool_call>\n<invoke name="tool-name-1">', MINIMAX),
        ("<|tool_call>call:' + name", GEMMA),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)
def test_the_template_says_which_format_it_is(template: str, form: Format | None) -> None:
    assert format_of(template) is form


def test_markers_that_are_special_tokens_stay_in_the_text() -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", eos_token="</s>")
    tokenizer.add_tokens([AddedToken("[ARGS]", special=True)], special_tokens=True)
    assert keep_markers(tokenizer, ["no", "such"]) is tokenizer
    ids = [0, tokenizer.convert_tokens_to_ids("[ARGS]"), 1, tokenizer.eos_token_id]
    assert "[ARGS]" not in tokenizer.decode(ids, skip_special_tokens=True)
    kept = keep_markers(tokenizer, MISTRAL.markers)
    assert kept.decode(ids, skip_special_tokens=True).split() == ["a", "[ARGS]", "b"]
    kept = keep_markers(tokenizer, ["[ARGS]thought"])  # a special token and more
    assert kept.decode(ids, skip_special_tokens=True).split() == ["a", "[ARGS]", "b"]
    assert kept.eos_token_id == tokenizer.eos_token_id


def test_of_templates_with_names_the_one_for_tools_counts(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    llm: Any = SimpleNamespace(tokenizer=tokenizer)
    config: Any = None
    plain, tools = "{{ messages }}", "{{ messages }}<tool_call>"
    for templates, expected in (
        ({"default": plain, "tool_use": tools}, tools),
        ({"default": tools}, tools),
        ({"other": tools}, ""),
        (plain, plain),
    ):
        tokenizer.chat_template = templates
        assert ChatEndpoint(llm, config, "tiny").template == expected
