"""Finds tool calls in streamed text, in the format that the model's chat template defines.

A call is returned when it is complete and right, arguments and all. What looks like one and is not
comes back as text, not a character less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .markers import first_marker, held_length
from .tool_formats import Format
from .tool_readers import LlamaReader, Reader
from .tool_syntax import Tool, Tools


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


class ToolCallParser:
    """Separates one answer's text from its tool calls.

    Args:
        tools: those of the request, in OpenAI's form. With them a call of another function is
            text, and arguments that are written as plain text get the types of the schema.
    """

    def __init__(self, form: Format, tools: Sequence[Tool] = ()):
        self._format = form
        self._tools = Tools(tools)
        self._starts = (*form.readers, *form.wrappers)  # markers outside blocks
        self._text = ""  # not taken yet; in a block, from its start marker on
        self._reader: Reader | None = None  # of the block that the text is in
        self._glue = ""  # blank space and wrappers before the text; dropped beside a call
        self._has_content = self._follows_call = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Returns what is sure now of the answer so far."""
        self._text += text
        return _joined(self._take())

    def finish(self, is_cut: bool = False) -> list[Event]:
        """Returns the rest, when the answer has ended.

        Args:
            is_cut: by the token limit. A call that it cut is text.
        """
        events = self._take(is_last=True, is_cut=is_cut)
        if self._follows_call:
            self._glue = ""
        return _joined([*events, *self._content("")])

    # -- the text ------------------------------------------------------------------------------
    def _take(self, *, is_last: bool = False, is_cut: bool = False) -> list[Event]:
        events: list[Event] = []
        while self._text:
            if self._reader is None and not self._begin_block(events, is_last):
                return events
            assert self._reader is not None
            block = self._reader.read(self._text)
            if block is None and is_last:
                block = self._reader.at_end(self._text, is_cut)
            if block is None:
                return events
            text, self._text = self._text[: block.end], self._text[block.end :]
            self._reader = None
            if not block.calls:
                events += self._content(text)
                continue
            self._glue = ""
            for call in block.calls:
                events.append(ToolCallDelta(self._num_calls, call.name, call.arguments, call.id))
                self._num_calls += 1
            self._follows_call = True
        return events

    def _begin_block(self, events: list[Event], is_last: bool) -> bool:
        """Takes the text before the next block. Returns whether the text begins with a block."""
        while True:
            self._take_glue()
            starts, bare = self._starts, self._format.bare
            if bare and self._may_be_bare() and self._text.startswith(bare):
                self._reader = LlamaReader("", self._tools)
                return True
            found = first_marker(self._text, starts)
            if found is not None and found[0] == 0 and found[1] in self._format.readers:
                self._reader = self._format.readers[found[1]](self._tools)
                return True
            end = found[0] if found is not None else len(self._text)
            if found is None and not is_last:
                end -= held_length(self._text, starts)
            text = self._text[:end].rstrip()
            if not text:  # all of it may belong to a marker, or it is blank
                return False
            events += self._content(text)
            self._text = self._text[len(text) :]

    def _take_glue(self) -> None:
        """Takes blank space, wrappers and the separator after a call from the text's beginning."""
        while self._text:
            blank = self._text[: len(self._text) - len(self._text.lstrip())]
            marker = next(
                (w for w in self._format.wrappers if self._text.startswith(w, len(blank))), ""
            )
            separator = self._format.separator
            is_between = separator and self._follows_call and separator not in self._glue
            if is_between and self._text.startswith(separator, len(blank)):
                marker = separator
            if not blank and not marker:
                return
            self._glue += blank + marker
            self._text = self._text[len(blank) + len(marker) :]

    def _may_be_bare(self) -> bool:
        if self._follows_call:
            return self._format.separator in self._glue
        return not self._has_content

    def _content(self, text: str) -> list[Event]:
        """Returns text with what stood before it. Beside a call wrappers are dropped."""
        glue, self._glue = self._glue, ""
        if self._follows_call and text:
            for wrapper in self._format.wrappers:
                glue = glue.replace(wrapper, "")
        if not glue + text:
            return []
        self._has_content, self._follows_call = True, False
        return [Content(glue + text)]


def _joined(events: list[Event]) -> list[Event]:
    """Joins text that follows text."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        else:
            joined.append(event)
    return joined
