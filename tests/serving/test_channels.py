"""gpt-oss's channels: reasoning, answer and tool calls, in any pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.serving.channels import ChannelSplitter, name_thinking
from trtspec.serving.reasoning import GPT_OSS, split_for
from trtspec.serving.tool_calls import Content, ToolCallDelta, ToolCallParser
from trtspec.serving.tool_formats import GPT_OSS as CALLS
from trtspec.serving.tool_formats import format_of

Split = tuple[str, str, list[tuple[str, Any]]]
LONG = "x" * 600
NEXT = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'


def split(pieces: list[str], tools: list[dict[str, Any]] | None = None) -> Split:
    """Returns reasoning, answer, and calls with their arguments."""
    splitter, parser = ChannelSplitter(), ToolCallParser(CALLS, tools or ())
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    assert all(part.text for part in parts)
    events = [event for p in parts if not p.is_reasoning for event in parser.feed(p.text)]
    events += parser.finish()
    return (
        "".join(part.text for part in parts if part.is_reasoning),
        "".join(event.text for event in events if isinstance(event, Content)),
        [(e.name, json.loads(e.arguments)) for e in events if isinstance(e, ToolCallDelta)],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}Hm.<|end|>{NEXT}{FINAL}Yes.", ("Hm.", "Yes.", [])),
        (f"{ANALYSIS}Hm.<|end|>{NEXT}{FINAL}Yes.<|return|>", ("Hm.", "Yes.", [])),
        (f"{FINAL}Yes < no <| maybe.", ("", "Yes < no <| maybe.", [])),
        (f"{ANALYSIS}A.<|end|>{NEXT}{ANALYSIS}B.<|end|>{NEXT}{FINAL}", ("A.\nB.", "", [])),
        (f"{ANALYSIS}Hm.<|end|>{NEXT}{CALL}<|call|>", ("Hm.", "", [("f", {"x": 1})])),
        (f"{ANALYSIS}Hm.<|end|>{NEXT}{CALL}", ("Hm.", "", [("f", {"x": 1})])),
        (
            ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}',
            ("", "", [("f", {"x": 1})]),
        ),
        (f"{CALL}<|call|>{NEXT}{CALL}<|call|>", ("", "", [("f", {"x": 1})] * 2)),
        (
            f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}<|call|>",
            ("", "I look.", [("f", {"x": 1})]),
        ),
        (
            f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{FINAL}No.",
            ("", "I look.\nNo.", []),
        ),
        (f"{ANALYSIS}cut o", ("cut o", "", [])),
        (f"{ANALYSIS}cut<|end|>{NEXT}<|channel|>fin", ("cut", "", [])),
        ("", ("", "", [])),
        ("Plain.", ("", "Plain.", [])),
        ("to=be or not", ("", "to=be or not", [])),
        ("  to", ("", "  to", [])),
        ('{"json": true}', ("", '{"json": true}', [])),
        ("<|channel|>" + LONG, ("", "<|channel|>" + LONG, [])),
        (f"<|channel|>{LONG}<|message|>a", ("", f"<|channel|>{LONG}<|message|>a", [])),
        ("<|start|>" + LONG, ("", "<|start|>" + LONG, [])),
        (f"{FINAL}Yes.<|start|>{LONG}", ("", f"Yes.\n<|start|>{LONG}", [])),
        (f"{FINAL}Yes.<|return|>\n<|start|>{LONG}", ("", f"Yes.\n\n<|start|>{LONG}", [])),
        (f"<|channel|>analysis{' ' * 480}<|message|>Hm.", ("Hm.", "", [])),
        ("<|channel|> analysis<|message|>Hm.", ("Hm.", "", [])),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", ("Hm.", "Yes.", [])),
        (f"{CALL}<|call|>{NEXT}{FINAL}Done.", ("", "Done.", [("f", {"x": 1})])),
        (f"{CALL}<|end|>{NEXT}{FINAL}Done.", ("", "Done.", [("f", {"x": 1})])),
        (
            f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL[:-1]}<|call|>",
            ("", 'I look.<|channel|>commentary to=f<|message|>{"x": 1<|call|>', []),
        ),
    ],
)  # fmt: skip
def test_texts(text: str, expected: Split) -> None:
    assert split([text]) == split(list(text)) == expected


def test_what_is_no_call_stays_text() -> None:
    """Broken JSON, and a function that the request has not."""
    broken = CALL.replace("1}", "1")
    assert split([broken]) == ("", '<|channel|>commentary to=f<|message|>{"x": 1', [])
    tools = [{"type": "function", "function": {"name": "g"}}]
    text = '<|channel|>commentary to=f<|message|>{"x": 1}<|call|>'
    assert split([f"{CALL}<|call|>"], tools) == ("", text, [])
    assert split([f"{CALL}<|call|>".replace(".f", ".g")], tools)[2] == [("g", {"x": 1})]


PIECES = [ANALYSIS, FINAL, CALL, "<|end|>", "<|call|>", NEXT, "<|start|>", "<|channel|>", "<|",
          "to=", "<|message|>", "commentary", " ", "\n", "word", "é"]  # fmt: skip


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
    places=st.lists(st.integers(0, 1000), max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_any_pieces_give_the_same(text: str, places: list[int]) -> None:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert split(pieces) == split([text]) == split(list(text))


def test_the_template_says_it() -> None:
    template = f"… {NEXT}{FINAL} … <|channel|>commentary to=functions. … {ANALYSIS} …"
    assert split_for(SimpleNamespace(chat_template=template)) is GPT_OSS
    assert split_for(SimpleNamespace(chat_template=template + "</think>")) is GPT_OSS
    assert format_of(template) is CALLS


def test_reasoning_before_calls_has_the_templates_name() -> None:
    call = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [{}]}
    others = [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
        call | {"content": "I look."},
        call | {"thinking": "So."},
    ]
    messages = [dict(message) for message in (call, *others)]
    name_thinking(messages)
    assert messages == [call | {"thinking": "Hm."}, *others]
