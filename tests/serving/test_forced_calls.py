"""`tool_choice` that forces calls: the grammar's texts are calls that the parser reads."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
import xgrammar

from trtspec.serving.channels import ChannelSplitter
from trtspec.serving.errors import ApiError
from trtspec.serving.forced_calls import tag_of_calls
from trtspec.serving.protocol import ChatRequest, parse
from trtspec.serving.tool_calls import Content, Event, ToolCallDelta, ToolCallParser
from trtspec.serving.tool_formats import (
    ARGUMENT_TAGS,
    DEEPSEEK,
    FUNCTION_TAGS,
    GEMMA,
    GPT_OSS,
    HERMES,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    Format,
)

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "at": {"type": "string", "pattern": "[0-9]{2}h"},
        "hours": {"type": "array", "items": {"enum": ["am", "pm"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK = {"name": "clock-2"}
TOOLS = [
    {"type": "function", "function": {"name": "get.weather", "parameters": WEATHER}},
    {"type": "function", "function": CLOCK},
]
NAMED: Any = {"type": "function", "function": {"name": "get.weather"}}
FORMS = [
    (HERMES, ""),
    (FUNCTION_TAGS, ""),
    (ARGUMENT_TAGS, ""),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS][ARGS]"),
    (LLAMA, ""),
    (DEEPSEEK, "```json"),
    (DEEPSEEK, ""),
    (KIMI, ""),
    (MINIMAX, ""),
    (GPT_OSS, ""),
]
TEXTS = [bytes([i]) for i in range(256)]
TEXTS += [
    f"</{name}>".encode() for name in ("parameter", "arg_value", "function", "tool_call", "invoke")
]
TEXTS += [marker.encode() for marker in (*DEEPSEEK.markers, *KIMI.markers)]
END = len(TEXTS)
VOCABULARY = xgrammar.TokenizerInfo([*TEXTS, b"</s>"], vocab_size=END + 1, stop_token_ids=[END])


def asked(choice: Any, tools: Any = TOOLS, **more: Any) -> ChatRequest:
    fields = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    body = json.dumps(fields | {"tools": tools, "tool_choice": choice} | more)
    return parse(ChatRequest, body.encode())


def matcher_of(form: Format, template: str, choice: Any, **more: Any) -> Any:
    tag = tag_of_calls(form, template, asked(choice, **more))
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
    return xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(VOCABULARY).compile_grammar(grammar))


def random_text(matcher: Any, seed: int) -> str:
    """Returns a text of the grammar, of random bytes among those that it allows."""
    choose, text = random.Random(seed), b""
    mask = xgrammar.allocate_token_bitmask(1, END + 1)
    while len(text) < 4000:
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [t for t in range(END + 1) if words[t // 32] >> (t % 32) & 1]
        ascii_ones = [t for t in allowed if not 128 <= t < 256]
        ending = [t for t in ascii_ones if t >= 256 or chr(t) in '"}]']
        likely = ending if ending and choose.random() < 0.5 else ascii_ones
        token = choose.choice(likely or allowed)
        assert matcher.accept_token(token)
        if token == END:
            return text.decode()
        text += TEXTS[token]
    raise AssertionError(f"no end: {text[-300:]!r}")


def events_of(form: Format, text: str) -> list[Event]:
    """Reads the answer as the server does."""
    splitter, parser = ChannelSplitter(), ToolCallParser(form, TOOLS)
    if form is not GPT_OSS:
        return parser.feed(text) + parser.finish()
    parts = splitter.feed(text) + splitter.finish()
    assert not any(part.is_reasoning for part in parts)
    return [event for part in parts for event in parser.feed(part.text)] + parser.finish()


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize(("form", "template"), FORMS, ids=lambda v: getattr(v, "name", v))
def test_texts_of_the_grammar_are_calls(form: Format, template: str, choice: Any) -> None:
    counts, names = set(), set()
    for seed in range(40):
        text = random_text(matcher_of(form, template, choice), seed)
        events = events_of(form, text)
        assert events and not any(isinstance(event, Content) for event in events), text
        calls = [event for event in events if isinstance(event, ToolCallDelta)]
        for call in calls:
            arguments = json.loads(call.arguments)
            if call.name == "clock-2":
                assert arguments == {}
            else:
                jsonschema.validate(arguments, WEATHER)
            names.add(call.name)
        counts.add(len(calls))
    if choice == "required":
        assert names == {"get.weather", "clock-2"}
        assert min(counts) == 1 and (max(counts) > 1) == (form not in (LLAMA, GPT_OSS))
    else:
        assert names == {"get.weather"} and counts == {1}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "template"), FORMS, ids=lambda v: getattr(v, "name", v))
def test_without_parallel_calls_there_is_one(form: Format, template: str) -> None:
    for seed in range(20):
        text = random_text(matcher_of(form, template, "required", parallel_tool_calls=False), seed)
        events = events_of(form, text)
        assert [type(event) for event in events] == [ToolCallDelta], text


def refused(choice: Any, tools: Any, form: Format = HERMES) -> ApiError:
    with pytest.raises(ApiError) as error:
        tag_of_calls(form, "", asked(choice, tools))
    assert error.value.status == 400
    return error.value


def test_what_cannot_be_forced_is_named() -> None:
    assert refused("required", TOOLS, GEMMA).param == "tool_choice"
    assert refused("required", []).param == "tool_choice"
    other = {"type": "function", "function": {"name": "other"}}
    assert "'other'" in refused(other, TOOLS).message

    def tool(**function: Any) -> list[Any]:
        return [TOOLS[0], {"type": "function", "function": {"name": "f"} | function}]

    assert refused("required", tool(name="a b")).param == "tools.1.function.name"
    param = "tools.1.function.parameters"
    assert refused("required", tool(parameters={"type": "array"})).param == param
    unenforced = {"type": "object", "properties": {"x": {"not": {}}}}
    error = refused("required", tool(parameters=unenforced))
    assert error.param == param and '"not" at #/properties/x' in error.message
    tag_of_calls(HERMES, "", asked(NAMED, tool(parameters=unenforced)))  # only what is asked for
    long = {"type": "object", "properties": {"x": {"type": "string", "maxLength": 5}}}
    error = refused("required", tool(parameters=long), FUNCTION_TAGS)
    assert error.param == param and '"maxLength" at #/properties/x' in error.message
    tag_of_calls(HERMES, "", asked("required", tool(parameters=long)))


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "tool_choice"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {"name": 5}}, "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice.type"),
    ],
    ids=str,
)
def test_a_wrong_choice_is_named(choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as error:
        asked(choice)
    assert error.value.param == param
