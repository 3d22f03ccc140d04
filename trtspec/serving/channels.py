"""Splits an answer in gpt-oss's form ("harmony"), whose messages each go to a channel, as the text
streams.

    <|channel|>analysis<|message|>…<|end|>                              reasoning
    <|start|>assistant<|channel|>commentary to=functions.F json<|message|>{…}<|call|>   a tool call
    <|start|>assistant<|channel|>final<|message|>…<|return|>            the answer

The prompt ends with `<|start|>assistant`. `to=` may stand before the channel, and the kind of a
call's content has a token before it or none. Commentary without `to=` is part of the answer. The
token that ends the output is not in its text.

Source: OpenAI's harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from .markers import first_marker, held_length
from .reasoning import Part, Splitter

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = "<|end|>", "<|return|>", "<|call|>"
CALL_START, CALL_END = "<|channel|>commentary to=", "<|call|>"
"""Around a call in the answer's text, as tool_formats.py reads it."""
MARKERS = START, CHANNEL, MESSAGE, *ENDS, "<|constrain|>"

_MAX_HEADER = 500  # characters; what is longer is no header
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class ChannelSplitter(Splitter):
    """Splits one answer. Calls stay in its text, in one form: `CALL_START` NAME `MESSAGE` {…}
    `CALL_END`.

    Text without a header at its beginning is the answer, as a grammar may make it write.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_header = True
        self._is_reasoning = self._is_call = False
        self._has = {True: False, False: False}  # is_reasoning -> a message of it has text
        self._begins = False  # the message at hand has no text yet

    def _take(self, *, is_last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held:
            before = len(self._held), self._in_header
            if self._in_header:
                parts += self._header(is_last)
            else:
                parts += self._body(is_last)
            if before == (len(self._held), self._in_header):
                break
        return parts

    def _header(self, is_last: bool) -> list[Part]:
        """Reads what stands before a message."""
        text = self._held.lstrip()
        end = text.find(MESSAGE)
        length = end if end >= 0 else len(text) - held_length(text, (MESSAGE,))
        is_header = any(text.startswith(s) or s.startswith(text) for s in (START, CHANNEL, "to="))
        if not is_header or length > _MAX_HEADER:
            return self._no_header(text)
        if end < 0 and not is_last:
            return []
        if end < 0:  # the output was cut within it
            if not text.startswith((START, CHANNEL)):
                return self._no_header(text)
            self._held = ""
            return []
        header, self._held = text[:end], text[end + len(MESSAGE) :]
        recipient, channel = _RECIPIENT.search(header), _NAME.search(header)
        if recipient is not None:
            name = recipient[1].removeprefix("functions.")
            self._begin(is_reasoning=False)
            self._is_call = True
            return [Part(f"{CALL_START}{name}{MESSAGE}", is_reasoning=False)]
        self._begin(is_reasoning=channel is not None and channel[1] == "analysis")
        return []

    def _no_header(self, text: str) -> list[Part]:
        """Makes a part of the answer of text without a header."""
        self._begin(is_reasoning=False)
        if not text.startswith(START):
            return []
        taken = len(self._held) - len(text) + len(START)  # else it would begin a header again
        marker, self._held = self._held[:taken], self._held[taken:]
        return self._text(marker)

    def _begin(self, *, is_reasoning: bool) -> None:
        self._in_header, self._begins = False, True
        self._is_reasoning, self._is_call = is_reasoning, False

    def _body(self, is_last: bool) -> list[Part]:
        """Takes the text of a message, up to its end or the next one's header."""
        found = first_marker(self._held, (*ENDS, START))
        if found is not None:
            text, self._held = self._held[: found[0]], self._held[found[0] :]
            if found[1] != START:
                self._held = self._held[len(found[1]) :]
            self._in_header = True
        else:
            held = 0 if is_last else held_length(self._held, (*ENDS, START))
            text = self._held[: len(self._held) - held]
            self._held = self._held[len(text) :]
        parts = self._text(text)
        if self._is_call and self._in_header:
            parts.append(Part(CALL_END, is_reasoning=False))
        return parts

    def _text(self, text: str) -> list[Part]:
        """Returns text of the message at hand; messages of a kind are lines apart."""
        if not text:
            return []
        kind = self._is_reasoning
        if self._is_call:
            return [Part(text, is_reasoning=False)]
        line = "\n" if self._begins and self._has[kind] else ""
        self._begins, self._has[kind] = False, True
        return [Part(line + text, is_reasoning=kind)]


def name_thinking(messages: Iterable[dict[str, Any]]) -> None:
    """Gives the template the reasoning before tool calls by its name there, in place."""
    for message in messages:
        reasoning = message.get("reasoning_content")
        if reasoning and message.get("tool_calls") and not message.get("content"):
            message.setdefault("thinking", reasoning)
