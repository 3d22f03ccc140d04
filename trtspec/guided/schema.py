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
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        yield f'a length beside "pattern" at {where}'
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
