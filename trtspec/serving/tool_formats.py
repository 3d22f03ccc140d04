"""The formats of tool calls, and which one a chat template defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .channels import CALL_END, CALL_START
from .tool_readers import LlamaReader, MistralReader, Parse, Reader, TagReader
from .tool_syntax import (
    Tools,
    deepseek_marker,
    ends_within,
    is_in_string,
    parse_argument_tags,
    parse_bare_function,
    parse_deepseek,
    parse_function_tags,
    parse_gemma,
    parse_gpt_oss,
    parse_hermes,
    parse_invokes,
    parse_kimi,
)


class Format(NamedTuple):
    """How a family writes calls.

    readers: start marker -> makes the reader of a block that begins with it.
    wrappers: markers around a list of blocks. They are dropped beside a call.
    inner: further markers, inside blocks.
    bare: the start, not a marker, of a call that may open an answer or follow another call.
    separator: text that may stand between two calls, beside blank space.
    """

    name: str
    readers: dict[str, Callable[[Tools], Reader]]
    wrappers: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare: str = ""
    separator: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers. The text must have them, also those that are special tokens."""
        return (*self.readers, *self.wrappers, *self.inner)


def _tagged(
    start: str, end: str, parse: Parse, is_open: Callable[[str], bool], proof: str | None = ""
) -> dict[str, Callable[[Tools], Reader]]:
    """Returns the reader of one kind of block, as of `TagReader`."""
    return {start: lambda tools: TagReader((start, end), parse, is_open, proof, tools)}


_IN_PARAMETER = ends_within("<parameter=", "</parameter>")
HERMES = Format(
    "hermes",
    _tagged("<tool_call>", "</tool_call>", parse_hermes, is_in_string),
    inner=("</tool_call>",),
)
FUNCTION_TAGS = Format(
    "function_tags",
    _tagged("<tool_call>", "</tool_call>", parse_function_tags, _IN_PARAMETER, "</function>")
    | _tagged("<function=", "</function>", parse_bare_function, _IN_PARAMETER, None),
    inner=("</tool_call>",),
)
ARGUMENT_TAGS = Format(
    "argument_tags",
    _tagged(
        "<tool_call>",
        "</tool_call>",
        parse_argument_tags,
        ends_within("<arg_value>", "</arg_value>"),
        proof=None,
    ),
    inner=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MISTRAL = Format("mistral", {MistralReader.START: MistralReader}, inner=("[CALL_ID]", "[ARGS]"))
LLAMA = Format(
    "llama",
    {LlamaReader.START: lambda tools: LlamaReader(LlamaReader.START, tools)},
    bare="{",
    separator=";",
)
DEEPSEEK = Format(
    "deepseek",
    _tagged(
        deepseek_marker("call\u2581begin"),
        deepseek_marker("call\u2581end"),
        parse_deepseek,
        is_in_string,
    ),
    wrappers=(deepseek_marker("calls\u2581begin"), deepseek_marker("calls\u2581end")),
    inner=(deepseek_marker("call\u2581end"), deepseek_marker("sep")),
)
KIMI = Format(
    "kimi",
    _tagged("<|tool_call_begin|>", "<|tool_call_end|>", parse_kimi, is_in_string),
    wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
)
MINIMAX = Format(
    "minimax",
    _tagged(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        parse_invokes,
        ends_within("<parameter name=", "</parameter>"),
        proof="</invoke>",
    ),
    inner=("</minimax:tool_call>",),
)
GEMMA = Format(
    "gemma",
    _tagged(
        "<|tool_call>", "<tool_call|>", parse_gemma, lambda inner: inner.count('<|"|>') % 2 == 1
    ),
    inner=("<tool_call|>", '<|"|>'),
)
GPT_OSS = Format(
    "gpt_oss", _tagged(CALL_START, CALL_END, parse_gpt_oss, is_in_string), inner=(CALL_END,)
)

_SIGNS: tuple[tuple[tuple[str, ...], Format], ...] = (
    ((deepseek_marker("call\u2581begin"),), DEEPSEEK),
    (("<|tool_call_begin|>",), KIMI),
    (("<minimax:tool_call>",), MINIMAX),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call>",), GEMMA),
    (("<|channel|>commentary", "functions."), GPT_OSS),
    (("<tool_call>", "<arg_key>"), ARGUMENT_TAGS),
    (("<function=", "<parameter="), FUNCTION_TAGS),
    (("<tool_call>",), HERMES),
    (("<|start_header_id|>", '"parameters"'), LLAMA),
    (("<|python_tag|>",), LLAMA),
)
"""What a chat template holds -> its format. The first that fits counts."""


def format_of(chat_template: str) -> Format | None:
    """Returns the format that a chat template defines; None if it is not known."""
    return next((f for signs, f in _SIGNS if all(sign in chat_template for sign in signs)), None)
