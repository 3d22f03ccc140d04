"""Finds tool calls in streamed text, in the format that the model's chat template defines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Content(NamedTuple):
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """One whole tool call, as one delta of OpenAI's stream."""

    index: int  # 0, 1, … in the answer
    name: str
    arguments: str  # a JSON object
    id: str | None  # if the model gave one


Event = Content | ToolCallDelta


def parser_for(chat_template: str, tools: Sequence[dict[str, Any]] = ()) -> ToolCallParser | None:
    """Returns a parser for one answer; None if the template defines no format that is known."""
    return None


class ToolCallParser:
    """Separates one answer's text from its tool calls."""

    markers: tuple[str, ...] = ()

    def feed(self, text: str) -> list[Event]:
        return [Content(text)]

    def finish(self) -> list[Event]:
        return []
