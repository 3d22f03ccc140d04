"""What a tool call says, as each family of models writes it.

What reads a call raises ValueError where there is none: it is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..guided.schema import python_types

Tool = Mapping[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")


class Call(NamedTuple):
    """One call. Its arguments are the text of a JSON object."""

    name: str
    arguments: str
    id: str | None = None  # if the model gave one


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
        if "string" in kinds and type(value) not in python_types(kinds - {"string"}):
            return text
        return text if not kinds and isinstance(value, str) else value


_EXACT = frozenset({"enum", "const", "pattern", "format"})


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


# -- families --------------------------------------------------------------------------------
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
    name, close, body = text.removeprefix("<function=").removesuffix("</function>").partition(">")
    if not close:
        raise ValueError("no end of the name")
    return _call_of_tags(name.strip(), body, _PARAMETER, tools)


def parse_bare_function(inner: str, tools: Tools) -> Call:
    """Reads the same, of a block that begins with `<function=`."""
    return parse_function_tags(f"<function={inner}", tools)


_INVOKE = re.compile(r"""\s*<invoke name=["']?([^"'>\n]+)["']?\s*>""")
_NAMED_PARAMETER = re.compile(
    r"""\s*<parameter name=["']?([^"'>\n]+)["']?[^>\n]*>(.*?)</parameter>""", re.DOTALL
)


def parse_invokes(inner: str, tools: Tools) -> list[Call]:
    """Reads `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>…`; the last
    call's end may be missing."""
    calls: list[Call] = []
    at = 0
    while (found := _INVOKE.match(inner, at)) is not None:
        arguments, at = _arguments(found[1], inner, found.end(), _NAMED_PARAMETER, tools)
        rest = inner[at:].lstrip()
        if rest and not rest.startswith("</invoke>"):
            break
        at = len(inner) - len(rest) + len("</invoke>") if rest else len(inner)
        calls.append(make_call(found[1].strip(), arguments, tools))
    if not calls or inner[at:].strip():
        raise ValueError("more than calls, or none")
    return calls


_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def parse_argument_tags(inner: str, tools: Tools) -> Call:
    """Reads `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…`."""
    name, tag, rest = inner.partition("<arg_key>")
    return _call_of_tags(name.strip(), tag + rest, _ARGUMENT, tools)


def _call_of_tags(name: str, body: str, pair: re.Pattern[str], tools: Tools) -> Call:
    arguments, at = _arguments(name, body, 0, pair, tools)
    if body[at:].strip():
        raise ValueError("more than arguments")
    return make_call(name, arguments, tools)


def _arguments(
    name: str, text: str, at: int, pair: re.Pattern[str], tools: Tools
) -> tuple[dict[str, Any], int]:
    """Returns the arguments that the text has from `at` on, and where they end."""
    arguments: dict[str, Any] = {}
    while (found := pair.match(text, at)) is not None:
        key, value = found[1].strip(), found[2]
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = tools.value(name.strip(), key, value)
        at = found.end()
    return arguments, at


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


def parse_gpt_oss(inner: str, tools: Tools) -> Call:
    """Reads `NAME<|message|>{…}`, which `channels.py` makes of a message to a function."""
    name, _, arguments = inner.partition("<|message|>")
    return make_call(name, load_json(arguments), tools)


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
