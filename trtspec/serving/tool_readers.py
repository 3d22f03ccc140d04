"""Where a tool call begins and ends in text that grows.

A `Reader` finds the end of one call, or of one list of calls, and reads it (`tool_syntax.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .markers import held_length
from .tool_syntax import Call, Tools, call_of, load_json, make_call

Parse = Callable[[str, Tools], Call | list[Call]]
_MOST_ENDS = 1000
"""End markers that may stand inside one block's values. Each is tried."""


class Block(NamedTuple):
    """The end of a block that began with a start marker. Without calls it is plain text."""

    end: int
    calls: Sequence[Call] = ()


class Reader(Protocol):
    """Reads one block as it grows. `text` begins with the start marker and only gets longer."""

    def read(self, text: str) -> Block | None:
        """Returns the block once its end is known."""

    def at_end(self, text: str, is_cut: bool) -> Block:
        """Returns what the block is if nothing follows `text`.

        Args:
            is_cut: because the token limit was reached. A part of a call is none.
        """


# -- blocks between two markers ----------------------------------------------------------------
class TagReader:
    """A block from a start marker to an end marker.

    Args:
        markers: start and end.
        parse: of the text between the markers.
        is_open: whether that text ends inside a value, so that the end marker may belong to it.
        proof: what stands at the end of a whole call, before the end marker. "": its brackets show
            that it is whole. None: nothing does.
    """

    def __init__(
        self,
        markers: tuple[str, str],
        parse: Parse,
        is_open: Callable[[str], bool],
        proof: str | None,
        tools: Tools,
    ):
        (self.start, self.end), self.tools = markers, tools
        self.parse, self.is_open, self.proof = parse, is_open, proof
        self._searched, self._ends = len(self.start), 0

    def read(self, text: str) -> Block | None:
        while True:
            at = text.find(self.end, self._searched)
            if at < 0:
                self._searched = max(self._searched, len(text) - len(self.end) + 1)
                return None
            inner, self._searched = text[len(self.start) : at], at + len(self.end)
            calls, self._ends = self._calls(inner), self._ends + 1
            if calls or not self.is_open(inner) or self._ends == _MOST_ENDS:
                return Block(self._searched, calls)

    def at_end(self, text: str, is_cut: bool) -> Block:
        first = text.find(self.end, len(self.start))
        if first >= 0:  # it was thought to belong to a value
            return Block(first + len(self.end))
        end = len(text) - held_length(text, (self.end,))  # without a part of the marker
        if is_cut:
            end = self._end_of_whole(text[:end])
        calls = self._calls(text[len(self.start) : end])
        if not calls:
            return Block(len(self.start))
        return Block(len(text) if self.end.startswith(text[end:].strip()) else end, calls)

    def _end_of_whole(self, text: str) -> int:
        """Returns where the last call ends that is surely whole; 0 without one."""
        if not self.proof:
            return 0 if self.proof is None else len(text)
        return text.rfind(self.proof) + len(self.proof) if self.proof in text else 0

    def _calls(self, inner: str) -> list[Call]:
        try:
            found = self.parse(inner, self.tools)
        except ValueError:
            return []
        return found if isinstance(found, list) else [found]


# -- blocks that end with their JSON -----------------------------------------------------------
class JsonEnd:
    """Finds where a JSON object or array ends in text that grows. It checks brackets only."""

    _OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

    def __init__(self, start: int):
        self._at, self._depth, self._in_string = start, 0, False

    def find(self, text: str) -> int | None:
        """Returns the index after the last bracket; None before it is there."""
        while True:
            found = (self._INSIDE if self._in_string else self._OUTSIDE).search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            char, self._at = found[0], found.end()
            if char == "\\":
                if self._at == len(text):  # what it escapes is not there yet
                    self._at -= 1
                    return None
                self._at += 1
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return self._at


class MistralReader:
    """`[TOOL_CALLS]` and a list of calls, or `NAME[ARGS]{…}`, perhaps with `[CALL_ID]ID`."""

    START = "[TOOL_CALLS]"
    _HEAD = re.compile(
        r"\s{0,50}(?:(?=\[[\s{\]])|([\w.\-]{1,128})(?:\[CALL_ID\]([\w\-]{1,64}))?(?:\[ARGS\])?"
        r"\s{0,50}(?=\{))"
    )
    _LONGEST_HEAD = 400  # longer than any that matches

    def __init__(self, tools: Tools):
        self.tools = tools
        self._json: JsonEnd | None = None
        self._head: re.Match[str] | None = None

    def read(self, text: str) -> Block | None:
        if self._head is None or self._json is None:
            self._head = self._HEAD.match(text, len(self.START))
            if self._head is None:
                is_text = len(text) > self._LONGEST_HEAD
                return Block(len(self.START)) if is_text else None
            self._json = JsonEnd(self._head.end())
        end = self._json.find(text)
        if end is None:
            return None
        try:
            calls = self._calls(self._head[1], self._head[2], text[self._head.end() : end])
        except ValueError:
            calls = []
        return Block(end if calls else len(self.START), calls)

    def at_end(self, text: str, is_cut: bool) -> Block:
        return self.read(text) or Block(len(self.START))

    def _calls(self, name: str | None, call_id: str | None, json_part: str) -> list[Call]:
        value = load_json(json_part)
        if name is not None:
            return [make_call(name, value, self.tools, call_id)]
        return [call_of(item, self.tools) for item in value]


class LlamaReader:
    """`<|python_tag|>` and a JSON object, or the object alone.

    Args:
        start: `START`, or "" for the object alone.
    """

    START = "<|python_tag|>"

    def __init__(self, start: str, tools: Tools):
        self.start, self.tools = start, tools
        self._json: JsonEnd | None = None

    def read(self, text: str) -> Block | None:
        if self._json is None:
            body = text[len(self.start) :].lstrip()
            if not body:
                return None
            if body[0] != "{":
                return Block(len(self.start))
            self._json = JsonEnd(len(text) - len(body))
        end = self._json.find(text)
        if end is None:
            return None
        try:
            return Block(end, [self._call(text[len(self.start) : end])])
        except ValueError:
            return Block(end)

    def at_end(self, text: str, is_cut: bool) -> Block:
        return self.read(text) or Block(len(text))

    def _call(self, body: str) -> Call:
        value = load_json(body)
        if not isinstance(value, dict) or not {"parameters", "arguments"} & value.keys():
            raise ValueError("no arguments")  # an answer in JSON may have a name
        return call_of(value, self.tools, ("parameters", "arguments"))
