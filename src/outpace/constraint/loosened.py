"""Schemas of fewer keywords, where an automaton cannot hold all of a tool's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from outpace.constraint.dfa import StepBudget
from outpace.constraint.keywords import resolve_reference
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

HELD_REFERENCE = re.compile(r"#(/items|/(properties|\$defs|definitions)/[^/]+)*")
"""References to parts that are never moved."""

OBJECT_KEYWORDS = {"properties", "required", "additionalProperties"}

TEXTS = ("title", "description", "default", "examples", "$comment")

LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
MAPPINGS = ("properties", "$defs", "definitions")
"""Keywords whose values are lists and mappings of schemas."""


def loosen_schema(schema: Mapping[str, Any], budget: StepBudget) -> Any:
    """Return a schema of keywords that an automaton holds; each object of the old one fits it.

    Patterns are dropped where the budget does not suffice.
    """
    schema = {**schema, "nullable": False}  # so that references find their targets
    return loosen_part(schema, loosen_part(schema, schema, budget), budget)


def loosen_part(schema: Any, root: Any, budget: StepBudget) -> Any:
    """Return a looser part of a schema, with the references whose targets `root` has."""
    if not isinstance(schema, Mapping):
        return schema
    found = {name: rule for name, rule in schema.items() if is_held(name, rule, root, budget)}
    if "patternProperties" in schema:  # so names of members are unknown
        found = {name: rule for name, rule in found.items() if name not in OBJECT_KEYWORDS}
    if "enum" in found or "const" in found:
        found = {name: found[name] for name in ("enum", "const") if name in found}
    if "oneOf" in found:
        both = [{"anyOf": found.pop("oneOf")}, *found.get("allOf", ())]
        found |= both[0] if "anyOf" not in found and len(both) == 1 else {"allOf": both}
    found = map_parts(found, partial(loosen_part, root=root, budget=budget))
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


def map_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with each schema in it changed."""
    found = dict(schema)
    for name, rule in schema.items():
        if name in LISTS and isinstance(rule, list):
            found[name] = [change(part) for part in rule]
        elif name in MAPPINGS and isinstance(rule, Mapping):
            found[name] = {key: change(part) for key, part in rule.items()}
        elif name in ("items", "additionalProperties"):
            found[name] = change(rule)
    return found


def drop_texts(schema: Any) -> Any:
    """Return a schema without the annotations that are long and restrict nothing."""
    if not isinstance(schema, Mapping):
        return schema
    return map_parts({n: rule for n, rule in schema.items() if n not in TEXTS}, drop_texts)


def is_held(name: str, rule: Any, root: Any, budget: StepBudget) -> bool:
    """Return whether a loosened schema keeps a keyword with this value."""
    if name not in HELD_KEYWORDS:
        return False
    if name in ("enum", "const"):
        values = rule if name == "enum" else [rule]
        return isinstance(values, list) and not any(isinstance(v, list | dict) for v in values)
    if name in LISTS:
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
            return is_reference_held(rule, root)
        case str() if name == "pattern":
            return is_pattern_held(rule, budget)
    return True


def is_reference_held(reference: str, root: Any) -> bool:
    """Return whether a reference names a part of a schema that stays in its place."""
    try:
        resolve_reference(root, reference, "#")
    except ValueError:
        return False
    return HELD_REFERENCE.fullmatch(reference) is not None


def is_pattern_held(pattern: str, budget: StepBudget) -> bool:
    """Return whether an automaton can search for a pattern."""
    try:
        search_pattern_dfa(pattern, "#", budget)
    except ValueError:
        return False
    return True
