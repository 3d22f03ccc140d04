"""What of JSON Schema a grammar cannot hold: it is refused, since it would be ignored."""

from __future__ import annotations

from collections.abc import Iterator
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


_LENGTHS = "minLength", "maxLength"
_ALONE = {
    "pattern": _LENGTHS,
    "format": (*_LENGTHS, "pattern"),
    "multipleOf": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
"""Keywords beside which XGrammar ignores others."""
_OF_TYPES = (
    *(*_LENGTHS, "pattern", "format", "multipleOf", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
)


def find_in_tag(tag: Any) -> str | None:
    """Returns the same of the schemas inside a structural tag."""
    if isinstance(tag, list):
        return next((found for child in tag if (found := find_in_tag(child))), None)
    if not isinstance(tag, dict):
        return None
    for name, child in tag.items():
        is_schema = name in ("schema", "json_schema") and isinstance(child, dict)
        found = find_unenforced(child) if is_schema else find_in_tag(child)
        if found is not None:
            return found
    return None


def find_unread(text: str) -> str | None:
    """Returns what XGrammar passes over in a regular expression; None if there is nothing.

    Those are anchors that do not stand at its ends, and look-arounds.
    """
    in_class, i = False, 0
    while i < len(text):
        character = text[i]
        if character == "\\":
            if text[i + 1 : i + 2] in ("A", "Z", "z", "b", "B") and not in_class:
                return f'"{text[i : i + 2]}"'
            i += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character == "(" and text[i + 1 : i + 3] in ("?=", "?!", "?<"):
            return f'"{text[i : i + 3]}"'
        elif (character == "^" and i > 0) or (character == "$" and i < len(text) - 1):
            return f'"{character}" in its middle'
        i += 1
    return None


def find_unenforced(schema: Any) -> str | None:
    """Returns what the grammar of a schema would not enforce, and where; None if there is nothing.

    Args:
        schema: parsed JSON.
    """
    return next(_unenforced(schema, "#"), None)


def _unenforced(schema: Any, where: str) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    for keyword in IGNORED:
        if keyword in schema and schema[keyword] is not False:
            yield f'"{keyword}" at {where}'
    alternatives = schema.get("allOf")
    if isinstance(alternatives, list) and len(alternatives) > 1:
        yield f'"allOf" of {len(alternatives)} schemas at {where}'
    constraints = sorted(set(schema) - _NOTES)
    for keyword in ("$ref", "anyOf", "oneOf", "allOf", "enum", "const"):
        if keyword not in schema:
            continue
        beside = [other for other in constraints if other != keyword]
        if keyword in ("enum", "const") and "type" in beside and _have_type(schema, keyword):
            beside.remove("type")  # beside values that have it, it says nothing new
        if beside:
            yield f'"{beside[0]}" beside "{keyword}" at {where}'
    for keyword, others in _ALONE.items():
        beside = [other for other in others if other in schema]
        if keyword in schema and beside:
            yield f'"{beside[0]}" beside "{keyword}" at {where}'
    if "multipleOf" in schema and "number" in str(schema.get("type")):
        yield f'"multipleOf" of a "number" at {where}'
    untyped = [keyword for keyword in _OF_TYPES if keyword in schema and "type" not in schema]
    if untyped:
        yield f'"{untyped[0]}" without "type" at {where}'
    if isinstance(schema.get("pattern"), str):
        unread = find_unread(schema["pattern"])
        if unread is not None:
            yield f'{unread} in "pattern" at {where}'
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list):
        unknown = [name for name in required if name not in (properties or {})]
        if unknown:
            yield f'"required" with "{unknown[0]}", which is not in "properties", at {where}'
    for keyword in _BY_NAME:
        if isinstance(schema.get(keyword), dict):
            for name, child in schema[keyword].items():
                yield from _unenforced(child, f"{where}/{keyword}/{name}")
    for keyword in _OF_LISTS:
        if isinstance(schema.get(keyword), list):
            for number, child in enumerate(schema[keyword]):
                yield from _unenforced(child, f"{where}/{keyword}/{number}")
    for keyword in _SINGLE:
        yield from _unenforced(schema.get(keyword), f"{where}/{keyword}")


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
    allowed = {cls for name in types for cls in _TYPES.get(name, ())}
    return isinstance(values, list) and all(type(value) in allowed for value in values)
