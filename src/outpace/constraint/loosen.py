"""Schemas of tools that are no contract: what an automaton cannot hold is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.constraint.strings import search_pattern_dfa

MAX_LOOSE_COUNT = 64
"""Largest count of characters, items or properties that a loosened schema keeps."""

HELD_KEYWORDS = {
    *("type", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "items", "prefixItems"),
    *("properties", "required", "additionalProperties", "pattern", "$defs", "definitions"),
    *("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum"),
}
"""Keywords that a loosened schema keeps where their value is supported."""

OBJECT_KEYWORDS = {"properties", "required", "additionalProperties"}

LISTS, MAPPINGS = ("anyOf", "allOf", "prefixItems"), ("properties", "$defs", "definitions")
"""Keywords whose values are lists and mappings of schemas."""


def loosen_schema(schema: Any) -> Any:
    """Return a schema of keywords that an automaton holds; each value of the old one fits it."""
    if not isinstance(schema, Mapping):
        return schema
    found = {name: rule for name, rule in schema.items() if is_held(name, rule)}
    if "patternProperties" in schema:  # the names of other members are unknown
        found = {name: rule for name, rule in found.items() if name not in OBJECT_KEYWORDS}
    if "enum" in found or "const" in found:
        found = {name: found[name] for name in ("enum", "const") if name in found}
    if "oneOf" in found:
        both = [{"anyOf": found.pop("oneOf")}, *found.get("allOf", ())]
        found |= both[0] if "anyOf" not in found and len(both) == 1 else {"allOf": both}
    for name in found.keys() & {*LISTS}:
        found[name] = [loosen_schema(part) for part in found[name]]
    for name in found.keys() & {*MAPPINGS}:
        found[name] = {key: loosen_schema(part) for key, part in found[name].items()}
    for name in found.keys() & {"items", "additionalProperties"}:
        found[name] = loosen_schema(found[name])
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


def is_held(name: str, rule: Any) -> bool:
    """Return whether a loosened schema keeps a keyword with this value."""
    if name not in HELD_KEYWORDS:
        return False
    if name in LISTS or name == "oneOf":
        return isinstance(rule, list)
    if name in MAPPINGS:
        return isinstance(rule, Mapping)
    match rule:
        case bool():
            return name == "additionalProperties"
        case int() | float():
            is_count = name.startswith(("minL", "maxL", "minI", "maxI"))
            return 0 <= rule <= MAX_LOOSE_COUNT if is_count else rule == int(rule)
        case list():
            return name != "items"
        case str() if name == "$ref":
            return rule.startswith("#")
        case str() if name == "pattern":
            return is_pattern_held(rule)
    return True


def is_pattern_held(pattern: str) -> bool:
    """Return whether an automaton can search for a pattern."""
    try:
        search_pattern_dfa(pattern, "#", loose=False)
    except ValueError:
        return False
    return True
