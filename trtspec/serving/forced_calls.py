"""`tag_of_calls`: the grammar of an answer that is tool calls and nothing else.

It follows the form in which the model's chat template writes calls, so that the parser reads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..guided.schema import find_unenforced
from .errors import refused
from .protocol import ChatRequest, Function, NamedTool
from .tool_formats import Format
from .tool_syntax import deepseek_marker, listed

Json = dict[str, Any]
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
"""Names that every parser reads."""
MAX_WHITE_SPACE = 40
"""Characters of it in a row, between values. Small models would write it for ever."""


class Frame(NamedTuple):
    """What stands around the arguments of a call; NAME is the function's name."""

    before: str
    after: str
    separator: str | None = "\n"  # between calls; None: the format has one call in an answer
    begin: str = ""  # of the list of calls
    end: str = ""
    after_number: str = ""  # if the call's number follows `before`, what follows the number
    style: str = "json"  # XGrammar's name for how arguments are written


_CALLS_BEGIN, _CALLS_END, _BEGIN, _END, _SEP = map(
    deepseek_marker,
    ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep"),
)
_NAMED = '{"name": "NAME", "arguments": '
_MISTRAL_LIST = Frame(_NAMED, "}", ", ", begin="[TOOL_CALLS] [", end="]")
_DEEPSEEK_V3 = Frame(
    f"{_BEGIN}function{_SEP}NAME\n```json\n", f"\n```{_END}", begin=_CALLS_BEGIN, end=_CALLS_END
)
_FRAMES = {  # by the name of the format
    "hermes": Frame(f"<tool_call>\n{_NAMED}", "}\n</tool_call>"),
    "function_tags": Frame(
        "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", style="qwen_xml"
    ),
    "argument_tags": Frame("<tool_call>NAME", "</tool_call>", style="glm_xml"),
    "mistral": Frame("[TOOL_CALLS]NAME[ARGS]", "", ""),
    "llama": Frame('{"name": "NAME", "parameters": ', "}", None),
    "deepseek": Frame(f"{_BEGIN}NAME{_SEP}", _END, "", begin=_CALLS_BEGIN, end=_CALLS_END),
    "kimi": Frame(
        "<|tool_call_begin|>functions.NAME:",
        "<|tool_call_end|>",
        "",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        after_number="<|tool_call_argument_begin|>",
    ),
    "minimax": Frame(
        '<invoke name="NAME">\n',
        "</invoke>\n",
        "",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        style="minimax_xml",
    ),
    # Its call ends with a token that ends the output, which no grammar may ask for.
    "gpt_oss": Frame(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", None
    ),
}


def tag_of_calls(form: Format, template: str, request: ChatRequest) -> Json:
    """Returns the structural tag that `tool_choice` asks for: one call or more, or one of a name.

    Args:
        template: the model's chat template, where a format has several forms.

    Raises:
        ApiError: calls cannot be forced in this format, or not for these tools.
    """
    frame = _frame_of(form, template)
    choice, tools = request.tool_choice, request.tools or []
    if frame is None:
        raise refused(
            "tool_choice",
            f"'tool_choice' cannot force a call in the format of this model ({form.name}): give "
            "'auto' or 'none'.",
        )
    name = choice.function.name if isinstance(choice, NamedTool) else None
    tags = [
        _tag_of(frame, tool.function, f"tools.{number}.function")
        for number, tool in enumerate(tools)
        if name in (None, tool.function.name)
    ]
    if not tags:
        what = f"names {name!r}, which is not in" if name is not None else "needs a tool in"
        raise refused("tool_choice", f"'tool_choice' {what} 'tools'.")
    has_one = name is not None or frame.separator is None or not request.parallel_tool_calls
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": frame.separator or "",
        "at_least_one": True,
        "stop_after_first": has_one,
    }
    return {"type": "structural_tag", "format": _sequence([frame.begin, calls, frame.end])}


def _frame_of(form: Format, template: str) -> Frame | None:
    if form.name == "mistral" and "[ARGS]" not in template:
        return _MISTRAL_LIST
    if form.name == "deepseek" and "```json" in template:
        return _DEEPSEEK_V3
    return _FRAMES.get(form.name)


def _tag_of(frame: Frame, function: Function, param: str) -> Json:
    """Returns the tag of one call."""
    if not _NAME.fullmatch(function.name):
        raise refused(
            f"{param}.name", f"'{param}.name' must be 1 … 128 of the characters A-Z a-z 0-9 _ . -."
        )
    arguments: Json = {
        "type": "json_schema",
        "json_schema": _schema_of(frame, function, f"{param}.parameters"),
        "style": frame.style,
        "max_whitespace_cnt": MAX_WHITE_SPACE,
    }
    number = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0}}
    parts: list[str | Json] = [arguments]
    if frame.after_number:
        parts = [number, frame.after_number, arguments]
    return {
        "type": "tag",
        "begin": frame.before.replace("NAME", function.name),
        "content": _sequence(parts),
        "end": frame.after,
    }


def _schema_of(frame: Frame, function: Function, param: str) -> Json:
    schema = function.parameters or {"type": "object", "properties": {}}
    if schema.get("type") != "object":
        raise refused(param, f'{param!r} must be a schema of "type": "object".')
    found = find_unenforced(schema) or (frame.style != "json" and _length_in(schema))
    if found:
        advice = "leave it out, or give tool_choice='auto'"
        raise refused(param, f"{param!r} has {found}, which no grammar can hold: {advice}.")
    return schema


def _length_in(schema: Json) -> str | None:
    """Returns where a text that is an argument has a length: plain text may have space around."""
    properties = schema.get("properties")
    for name, child in properties.items() if isinstance(properties, dict) else ():
        for form in (child, *listed(child, "anyOf")) if isinstance(child, dict) else ():
            found = sorted({"minLength", "maxLength"}.intersection(form))
            if found:
                return f'"{found[0]}" at #/properties/{name}'
    return None


def _sequence(parts: Sequence[str | Json]) -> Json:
    """Returns parts in a row; texts stand for themselves, and empty ones are left out."""
    elements = [
        {"type": "const_string", "value": part} if isinstance(part, str) else part
        for part in parts
        if part
    ]
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
