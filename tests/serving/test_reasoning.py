"""Reasoning is split from the answer, in any pieces."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtspec.serving.reasoning import (
    GEMMA,
    MISTRAL,
    THINK,
    Part,
    ReasoningMarkers,
    ReasoningSplitter,
    split_for,
    starts_inside,
)


def split(markers: ReasoningMarkers, pieces: list[str], inside: bool = False) -> tuple[str, str]:
    """Returns the reasoning and the answer."""
    splitter = ReasoningSplitter(markers, inside)
    found = [p for piece in pieces for p in splitter.feed(piece)] + splitter.finish()
    assert all(piece.text for piece in found)
    kinds = [piece.is_reasoning for piece in found]
    assert kinds == sorted(kinds, reverse=True), "reasoning comes first"
    reasoning, answer = (
        "".join(p.text for p in found if p.is_reasoning is r) for r in (True, False)
    )
    return reasoning, answer


@pytest.mark.parametrize("markers", [THINK, MISTRAL, GEMMA])
@pytest.mark.parametrize("inside", [False, True])
def test_one_stretch_of_reasoning(markers: ReasoningMarkers, inside: bool) -> None:
    start = "" if inside else f"\n{markers.start}"
    text = f"{start}\nOne.\n\nTwo.\n{markers.end}\n\nThe answer is {markers.start}.\n"
    expected = "One.\n\nTwo.", f"The answer is {markers.start}.\n"
    assert split(markers, [text], inside) == split(markers, list(text), inside) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", "")),
        ("Plain.", ("", "Plain.")),
        ("  Plain.", ("", "  Plain.")),
        ("<thin", ("", "<thin")),
        ("<thing>", ("", "<thing>")),
        ("A <think>b</think>", ("", "A <think>b</think>")),
        ("<think></think>x", ("", "x")),
        ("<think>\n\n</think>\n\nx", ("", "x")),
        ("<think>cut off </thi", ("cut off </thi", "")),
        ("<think>cut off \n", ("cut off", "")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
        ("<think>a </th b</think>", ("a </th b", "")),
    ],
)
def test_odd_texts(text: str, expected: tuple[str, str]) -> None:
    assert split(THINK, [text]) == split(THINK, list(text)) == expected


PIECES = ["<think>", "</think>", "<thi", "nk>", "</", "think", ">", "\n", " ", "word", "[", "é"]


@given(
    text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    places=st.lists(st.integers(0, 1000), max_size=8),
    inside=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_pieces_give_the_same(text: str, places: list[int], inside: bool) -> None:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole = split(THINK, [text], inside)
    assert split(THINK, pieces, inside) == whole == split(THINK, list(text), inside)
    if THINK.start not in text and not inside:
        assert whole == ("", text)


def test_text_is_not_held_longer_than_needed() -> None:
    splitter = ReasoningSplitter(THINK, starts_inside=True)
    assert splitter.feed("Hm, ") == [Part("Hm,", True)]
    assert splitter.feed("so </") == [Part(" so", True)]
    assert splitter.feed("b>") == [Part(" </b>", True)]
    assert splitter.feed("</think>\n") == []
    assert splitter.feed("Yes ") == [Part("Yes ", False)]


def tokenizer(template: Any, *vocabulary: str) -> Any:
    return SimpleNamespace(chat_template=template, get_vocab=lambda: dict.fromkeys(vocabulary, 0))


def test_markers_come_from_the_template_or_the_vocabulary() -> None:
    assert split_for(tokenizer("… content.split('</think>')[-1] …")) is THINK
    assert split_for(tokenizer("[THINK] … [/THINK]")) is MISTRAL
    assert split_for(tokenizer("<|channel>thought\n … <channel|>")) is GEMMA
    assert split_for(tokenizer({"default": "no", "tool_use": "</think>"})) is THINK
    assert split_for(tokenizer("{{ m.content }}", "<think>", "</think>")) is THINK
    assert split_for(tokenizer("{{ m.content }}", "<think>")) is None
    assert split_for(tokenizer(None)) is None


def test_whether_the_prompt_begins_the_reasoning() -> None:
    assert starts_inside("<|assistant|><think>\n", THINK)
    assert not starts_inside("<|assistant|>", THINK)
    assert not starts_inside("<|user|>What is <think>?\n<|assistant|>\n", THINK)
    assert not starts_inside("<think>old</think> … <|assistant|><think>\n\n</think>\n\n", THINK)
