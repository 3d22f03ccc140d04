"""What of JSON Schema a grammar cannot hold: it is refused, since it would be ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

IGNORED = (
    "not",
    "if",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that no context-free grammar of XGrammar 0.2.7 enforces."""
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_NOTES |= {"$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "discriminator"}
_BY_NAME = "properties", "patternProperties", "$defs", "definitions"
_OF_LISTS = "anyOf", "oneOf", "allOf", "prefixItems"
_SINGLE = (
    "items",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
)
MOST_MULTIPLE = 1024
"""The largest "multipleOf" that XGrammar enforces."""
LENGTHS = "minLength", "maxLength"
_ALONE = {
    "pattern": LENGTHS,
    "format": (*LENGTHS, "pattern"),
    "multipleOf": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "propertyNames": ("properties", "patternProperties"),
}
"""Keywords beside which XGrammar ignores others."""
_OF_TYPES = (
    *(*LENGTHS, "pattern", "format", "multipleOf", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)
_OF_OBJECTS = "patternProperties", "propertyNames", "minProperties", "maxProperties"
_MAKE_OBJECTS = "type", "properties", "additionalProperties", "unevaluatedProperties"
"""A schema with one of them is an object's, or says its type."""


def find_in_tag(tag: Any) -> str | None:
    """Returns what is found first in the schemas and regular expressions of a structural tag."""
    if isinstance(tag, list):
        return next((found for child in tag if (found := find_in_tag(child))), None)
    if not isinstance(tag, dict):
        return None
    for name, child in tag.items():
        is_schema = name in ("schema", "json_schema") and isinstance(child, dict)
        if isinstance(child, str):
            is_regex = name == "pattern" and tag.get("type") == "regex"
            found = find_unread(child) if is_regex else None
        else:
            found = find_unenforced(child) if is_schema else find_in_tag(child)
        if found is not None:
            return found
    return None


_READ = re.compile(
    r"\\(?:[dDwWsSnrtfvae]|0(?!\d)|x[0-9a-fA-F]{2}(?![0-9a-fA-F])|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r"|u\{[0-9a-fA-F]+\}|c[a-zA-Z]|[^a-zA-Z0-9])",
    re.DOTALL,
)
"""Escapes that XGrammar 0.2.7 reads as JavaScript does. It takes as many hexadecimal digits after
"\\x" as come, half a surrogate pair for a character, and unknown letters for themselves."""
_CARET = re.compile(r"\[\\(?:\^|x5[eE]|u005[eE]|u\{0*5[eE]\})")
"""The beginning of a class that XGrammar reads as "[^", without the backslash."""


def find_unread(text: str) -> str | None:
    """Returns what XGrammar passes over in a regular expression, or reads as something else; None
    if there is nothing.

    Those are anchors that do not stand at its ends, look-arounds, and some escapes.
    """
    in_class, i = False, 0
    while i < len(text):
        character = text[i]
        if character == "\\":
            is_backspace = in_class and text[i + 1 : i + 2] == "b"
            if not is_backspace and _READ.match(text, i) is None:
                return f'"{text[i : i + (5 if text[i + 1 : i + 2] in ("x", "u") else 2)]}"'
            i += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            if (caret := _CARET.match(text, i)) is not None:
                return f'"{caret[0]}" (write it elsewhere in the class)'
            if text.startswith("[^]", i):  # JavaScript's class of any character
                return '"[^]" (write "]" in a class as "\\]")'
            in_class = True
        elif character == "(" and text[i + 1 : i + 3] in ("?=", "?!", "?<"):
            return f'"{text[i : i + 3]}"'
        elif (character == "^" and i > 0) or (character == "$" and i < len(text) - 1):
            return f'"{character}" in its middle'
        i += 1
    return None


_ATOM = re.compile(
    r"\\u\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\c[a-zA-Z]|\\.|.", re.DOTALL
)
_CONTROLS = set("nrtfvb0c")


def find_unescaped(pattern: str) -> str | None:
    """Returns a character of a pattern that JSON escapes; None if there is none.

    Those are a quotation mark, a backslash and control characters. XGrammar writes them as they
    are, which is no JSON. From a class that has others, too, it never takes one.
    """
    members: list[str] | None = None  # of the class that is read
    for atom in _ATOM.findall(pattern):
        if members is None:
            if atom == "[":
                members = []
            elif _needs_escape(atom):
                return repr(atom)
        elif atom != "]":
            members.append(atom)
        else:
            if members and all(map(_needs_escape, members)):
                return repr(members[0])
            members = None
    return None


def _needs_escape(atom: str) -> bool:
    if len(atom) == 1:
        code = ord(atom)
    elif atom[1] in "xu" and len(atom) > 2:
        code = int(atom[2:].strip("{}"), 16)
    else:
        return atom[1] in _CONTROLS or atom[1] in '"\\' or atom[1] < " "
    return code < 0x20 or code in (0x22, 0x5C)


def find_unenforced(schema: Any) -> str | None:
    """Returns what the grammar of a schema would not enforce, and where; None if there is nothing.

    Args:
        schema: parsed JSON.
    """
    return next(_unenforced(schema, "#"), None)


def _unenforced(schema: Any, where: str) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    for found in _unenforced_here(schema):
        yield f"{found} at {where}"
    for path, child in _children(schema):
        yield from _unenforced(child, f"{where}/{path}")


def _unenforced_here(schema: dict[str, Any]) -> Iterator[str]:
    """Yields what does not hold of a schema itself, whatever the schemas inside."""
    for rule in (
        _ignored,
        _beside_another,
        _odd_multiples,
        _odd_references,
        _untyped,
        _unheld_patterns,
        _unknown_required,
    ):
        yield from rule(schema)


def _ignored(schema: dict[str, Any]) -> Iterator[str]:
    for keyword in IGNORED:
        if keyword in schema and schema[keyword] is not False:
            yield f'"{keyword}"'
    alternatives = schema.get("allOf")
    if isinstance(alternatives, list) and len(alternatives) > 1:
        yield f'"allOf" of {len(alternatives)} schemas'


def _beside_another(schema: dict[str, Any]) -> Iterator[str]:
    """Keywords that another one hides."""
    constraints = sorted(set(schema) - _NOTES)
    for keyword in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const"):
        if keyword not in schema:
            continue
        beside = [other for other in constraints if other != keyword]
        if keyword in ("enum", "const") and "type" in beside and _have_type(schema, keyword):
            beside.remove("type")  # beside values that have it, it says nothing new
        if beside:
            yield f'"{beside[0]}" beside "{keyword}"'
    for keyword, others in _ALONE.items():
        beside = [other for other in others if other in schema]
        if keyword in schema and beside:
            yield f'"{beside[0]}" beside "{keyword}"'


def _odd_multiples(schema: dict[str, Any]) -> Iterator[str]:
    if "multipleOf" in schema and "number" in str(schema.get("type")):
        yield '"multipleOf" of a "number"'
    step = schema.get("multipleOf", 1)
    if not (isinstance(step, int | float) and step in range(1, MOST_MULTIPLE + 1)):
        yield f'"multipleOf" {step!r}, which is not an integer in 1 … {MOST_MULTIPLE},'


def _odd_references(schema: dict[str, Any]) -> Iterator[str]:
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        yield f'"$ref" to {reference!r} (only "#" and "#/…" are read)'


def _untyped(schema: dict[str, Any]) -> Iterator[str]:
    untyped = [keyword for keyword in _OF_TYPES if keyword in schema and "type" not in schema]
    if not any(keyword in schema for keyword in _MAKE_OBJECTS):
        untyped += [keyword for keyword in _OF_OBJECTS if keyword in schema]
    if untyped:
        yield f'"{untyped[0]}" without "type"'


def _unknown_required(schema: dict[str, Any]) -> Iterator[str]:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list):
        unknown = [name for name in required if name not in (properties or {})]
        if unknown:
            yield f'"required" with "{unknown[0]}", which is not in "properties",'


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (path, schema) of the schemas inside."""
    for keyword in _BY_NAME:
        if isinstance(schema.get(keyword), dict):
            yield from ((f"{keyword}/{name}", child) for name, child in schema[keyword].items())
    for keyword in _OF_LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((f"{keyword}/{i}", child) for i, child in enumerate(schema[keyword]))
    for keyword in _SINGLE:
        yield keyword, schema.get(keyword)


def _unheld_patterns(schema: dict[str, Any]) -> Iterator[str]:
    """Yields what does not hold of "pattern" and of the names in "patternProperties"."""
    by_name = schema.get("patternProperties")
    names = list(by_name) if isinstance(by_name, dict) else []
    patterns = [("pattern", schema.get("pattern")), *(("patternProperties", n) for n in names)]
    for keyword, pattern in patterns:
        if not isinstance(pattern, str):
            continue
        if (unread := find_unread(pattern)) is not None:
            yield f'{unread} in "{keyword}"'
        if (unescaped := find_unescaped(pattern)) is not None:
            yield f'{unescaped}, which JSON escapes, in "{keyword}"'


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def _have_type(schema: dict[str, Any], keyword: str) -> bool:
    """Whether all values of "enum" or "const" have the type beside it."""
    values = schema[keyword] if keyword == "enum" else [schema[keyword]]
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    allowed = python_types(types)
    return isinstance(values, list) and all(type(value) in allowed for value in values)


def python_types(names: Iterable[str]) -> set[type]:
    """Returns the types that json reads values of JSON Schema's types as."""
    return {cls for name in names for cls in _TYPES.get(name, ())}
