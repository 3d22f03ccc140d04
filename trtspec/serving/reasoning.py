"""Splits a model's reasoning from its answer, as the text streams."""

from __future__ import annotations

from typing import Any, NamedTuple


class ReasoningMarkers(NamedTuple):
    """The text before and after reasoning."""

    start: str
    end: str


class Piece(NamedTuple):
    """Text that is all reasoning, or all answer."""

    text: str
    is_reasoning: bool


def split_for(tokenizer: Any) -> ReasoningMarkers | None:
    """Returns the markers of a tokenizer; None if it has none that are known."""
    return None


def starts_inside(prompt: str, markers: ReasoningMarkers) -> bool:
    """Returns whether a rendered prompt ends inside reasoning."""
    return prompt.rfind(markers.start) > prompt.rfind(markers.end)


class ReasoningSplitter:
    """Splits one answer."""

    def __init__(self, markers: ReasoningMarkers, starts_inside: bool):
        self.markers = markers

    def feed(self, piece: str) -> list[Piece]:
        return [Piece(piece, is_reasoning=False)]

    def finish(self) -> list[Piece]:
        return []
