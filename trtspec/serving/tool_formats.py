"""How families of models write tool calls: where one begins and ends, and what it says.

The chat template of a family defines its format. A `Reader` finds the end of one call (or of one
list of calls) and reads it. What reads a call raises ValueError where there is none: it is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Tool = Mapping[str, Any]
Parse = Callable[[str, "Tools"], "Call"]

_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


class Call(NamedTuple):
    """One call. Its arguments are the text of a JSON object."""

    name: str
    arguments: str
    id: str | None = None  # if the model gave one


class Block(NamedTuple):
    """The end of a block that began with a start marker. Without calls it is plain text."""

    end: int
    calls: Sequence[Call] = ()


class Reader(Protocol):
    """Reads one block as it grows. `text` begins with the start marker and only gets longer."""

    def read(self, text: str) -> Block | None:
        """Returns the block once its end is known."""

    def at_end(self, text: str) -> Block:
        """Returns what the block is if nothing follows `text`."""


class Tools:
    """Names and parameter types of the tools that a request offers.

    Args:
        tools: as in OpenAI's requests: {"type": "function", "function": {"name": …, …}}.
    """

    def __init__(self, tools: Sequence[Tool]):
        functions = [tool.get("function", tool) for tool in tools]
        self._properties: dict[str, Mapping[str, Any]] = {}
        for function in functions:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            name = str(function.get("name"))
            self._properties[name] = found if isinstance(found, Mapping) else {}

    def may_have(self, name: str) -> bool:
        """Returns whether it is one of the tools; of an unknown list it may be."""
        return not self._properties or name in self._properties

    def value(self, function: str, parameter: str, text: str) -> Any:
        """Converts an argument that was written as plain text, by its type in the schema.

        Without a schema it is JSON if it can be read as such, but for JSON's strings. Blank space
        around a text is no part of it where the schema has values, a pattern or a format.
        """
        schema = self._properties.get(function, {}).get(parameter)
        schema = schema if isinstance(schema, Mapping) else {}
        if not _EXACT.isdisjoint(schema) and text not in listed(schema, "enum"):
            text = text.strip()
        kinds = _types_of(schema)
        if kinds == {"string"}:
            return text
        try:
            value = load_json(text)
        except ValueError:
            return text
        if "string" in kinds and type(value) not in {t for k in kinds for t in _OF_TYPE.get(k, ())}:
            return text
        return text if not kinds and isinstance(value, str) else value


_EXACT = frozenset({"enum", "const", "pattern", "format"})
_OF_TYPE: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    """Returns JSON Schema's names of the types that a value may have, as far as they are given."""
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(map(str, listed(schema, "type")))
    for child in listed(schema, "anyOf") + listed(schema, "oneOf"):
        types |= _types_of(child) if isinstance(child, Mapping) else set()
    return types


def listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Returns a keyword's list; [] if it has none."""
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


# -- JSON --------------------------------------------------------------------------------------
def load_json(text: str) -> Any:
    """Reads JSON, strictly: no NaN or Infinity. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def json_text(value: Any) -> str:
    """Returns compact JSON that can be encoded in UTF-8. Raises ValueError."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value, allow_nan=False)
    return text


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


def call_of(value: Any, tools: Tools, keys: tuple[str, ...] = ("arguments",)) -> Call:
    """Returns the call that a JSON object {"name": …, "arguments": {…}} says."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no object with a name")
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):  # JSON within JSON
        arguments = load_json(arguments)
    given = value.get("id")
    call_id = given if isinstance(given, str) and given.isprintable() else None
    return make_call(value["name"], arguments, tools, call_id)


def make_call(name: str, arguments: Any, tools: Tools, call_id: str | None = None) -> Call:
    name = name.strip()
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict) or not _NAME.fullmatch(name) or not tools.may_have(name):
        raise ValueError("no call of these tools")
    return Call(name, json_text(arguments), call_id)


# -- blocks between two markers ----------------------------------------------------------------
class TagReader:
    """A block from a start marker to an end marker.

    Args:
        parse: of the text between the markers.
        is_open: whether that text ends inside a value, so that the end marker may belong to it.
    """

    def __init__(
        self, start: str, end: str, parse: Parse, is_open: Callable[[str], bool], tools: Tools
    ):
        self.start, self.end, self.tools = start, end, tools
        self.parse, self.is_open = parse, is_open
        self._searched = len(start)

    def read(self, text: str) -> Block | None:
        while True:
            at = text.find(self.end, self._searched)
            if at < 0:
                self._searched = max(self._searched, len(text) - len(self.end) + 1)
                return None
            inner, self._searched = text[len(self.start) : at], at + len(self.end)
            calls = self._calls(inner)
            if calls or not self.is_open(inner):
                return Block(self._searched, calls)

    def at_end(self, text: str) -> Block:
        first = text.find(self.end, len(self.start))
        if first >= 0:  # it was thought to belong to a value
            return Block(first + len(self.end))
        calls = self._calls(text[len(self.start) :])
        return Block(len(text) if calls else len(self.start), calls)

    def _calls(self, inner: str) -> list[Call]:
        try:
            return [self.parse(inner, self.tools)]
        except ValueError:
            return []


def parse_hermes(inner: str, tools: Tools) -> Call:
    return call_of(load_json(inner), tools, ("arguments", "parameters"))


def is_in_string(inner: str) -> bool:
    """Returns whether JSON text ends inside a string."""
    return len(re.findall(r'(?<!\\)(?:\\\\)*"', inner)) % 2 == 1


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


def parse_function_tags(inner: str, tools: Tools) -> Call:
    """Reads `<function=NAME><parameter=KEY>\\nVALUE\\n</parameter>…</function>`."""
    text = inner.strip()
    if not text.startswith("<function="):
        raise ValueError("no function")
    name, _, body = text.removeprefix("<function=").removesuffix("</function>").partition(">")
    return _call_of_tags(name.strip(), body, _PARAMETER, tools)


def parse_bare_function(inner: str, tools: Tools) -> Call:
    """Reads the same, of a block that begins with `<function=`."""
    return parse_function_tags(f"<function={inner}", tools)


_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def parse_argument_tags(inner: str, tools: Tools) -> Call:
    """Reads `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…`."""
    name, tag, rest = inner.partition("<arg_key>")
    return _call_of_tags(name.strip(), tag + rest, _ARGUMENT, tools)


def _call_of_tags(name: str, body: str, pair: re.Pattern[str], tools: Tools) -> Call:
    arguments: dict[str, Any] = {}
    at = 0
    while (found := pair.match(body, at)) is not None:
        key, value = found[1].strip(), found[2]
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = tools.value(name, key, value)
        at = found.end()
    if body[at:].strip():
        raise ValueError("more than arguments")
    return make_call(name, arguments, tools)


def ends_within(opening: str, closing: str) -> Callable[[str], bool]:
    """Returns a function that says whether text ends between two tags."""
    return lambda inner: inner.rfind(opening) > inner.rfind(closing)


def deepseek_marker(name: str) -> str:
    """Returns `<|tool NAME|>` with DeepSeek's wide bars, and low blocks for spaces."""
    return f"<\uff5ctool\u2581{name}\uff5c>"


_SEPARATOR = deepseek_marker("sep")
_DEEPSEEK_V3 = re.compile(rf"function\s*{_SEPARATOR}\s*([^\s<]+)\s*```(?:json)?(.*)```", re.DOTALL)


def parse_deepseek(inner: str, tools: Tools) -> Call:
    """Reads V3's form, with the arguments in a fence, or V3.1's: name, separator, JSON."""
    fenced = _DEEPSEEK_V3.fullmatch(inner.strip())
    name, _, arguments = inner.partition(_SEPARATOR)
    if fenced is not None:
        name, arguments = fenced[1], fenced[2]
    return make_call(name, load_json(arguments), tools)


def parse_kimi(inner: str, tools: Tools) -> Call:
    """Reads `functions.NAME:0<|tool_call_argument_begin|>{…}`; what is before it is the id."""
    head, _, arguments = inner.partition("<|tool_call_argument_begin|>")
    name = re.sub(r":\d+$", "", head.strip()).removeprefix("functions.")
    return make_call(name, load_json(arguments), tools, head.strip())


# -- Gemma 4 -----------------------------------------------------------------------------------
_QUOTE = '<|"|>'
_GEMMA_TOKEN = re.compile(
    r'\s*(<\|"\|>.*?<\|"\|>|[{}\[\],:]|[^\s{}\[\],:<][^{}\[\],:<]*)', re.DOTALL
)
_MAX_DEPTH = 64


def parse_gemma(inner: str, tools: Tools) -> Call:
    """Reads `call:NAME{key:VALUE,…}`, where the token `<|"|>` quotes strings."""
    head, brace, rest = inner.partition("{")
    name = head.strip().removeprefix("call:")
    if not brace or name == head.strip():
        raise ValueError("no call")
    tokens = _gemma_tokens(brace + rest)
    try:
        value = _gemma_value(tokens, 0)
    except IndexError:
        raise ValueError("it ends inside a value") from None
    if tokens:
        raise ValueError("more than arguments")
    return make_call(name, value, tools)


def _gemma_tokens(text: str) -> list[str]:
    """Returns the tokens in reverse, so that the next one is popped."""
    tokens, at = [], 0
    while (found := _GEMMA_TOKEN.match(text, at)) is not None:
        tokens.append(found[1])
        at = found.end()
    if text[at:].strip():
        raise ValueError("no value")
    return tokens[::-1]


def _gemma_value(tokens: list[str], depth: int) -> Any:
    token = tokens.pop()
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if token == "{":
        return dict(_gemma_items(tokens, "}", lambda: _gemma_pair(tokens, depth)))
    if token == "[":
        return list(_gemma_items(tokens, "]", lambda: _gemma_value(tokens, depth + 1)))
    if token.startswith(_QUOTE):
        return token[len(_QUOTE) : -len(_QUOTE)]
    if token in "}],:":
        raise ValueError("a value is missing")
    return load_json(token.strip())


def _gemma_items(tokens: list[str], end: str, item: Callable[[], Any]) -> list[Any]:
    items: list[Any] = []
    if tokens[-1] == end:
        tokens.pop()
        return items
    while True:
        items.append(item())
        token = tokens.pop()
        if token == end:
            return items
        if token != ",":
            raise ValueError("a comma is missing")


def _gemma_pair(tokens: list[str], depth: int) -> tuple[str, Any]:
    key = tokens.pop()
    key = key.removeprefix(_QUOTE).removesuffix(_QUOTE).strip()
    if tokens.pop() != ":":
        raise ValueError("a colon is missing")
    return key, _gemma_value(tokens, depth + 1)


# -- blocks that end with their JSON -----------------------------------------------------------
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

    def at_end(self, text: str) -> Block:
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

    def at_end(self, text: str) -> Block:
        return self.read(text) or Block(len(text))

    def _call(self, body: str) -> Call:
        value = load_json(body)
        if not isinstance(value, dict) or not {"parameters", "arguments"} & value.keys():
            raise ValueError("no arguments")  # an answer in JSON may have a name
        return call_of(value, self.tools, ("parameters", "arguments"))
