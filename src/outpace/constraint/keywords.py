"""Keywords of JSON schemas: supported, ignored and unsupported ones, and alternatives to these."""

from __future__ import annotations

from typing import Any, NoReturn

from outpace.constraint.pattern import UnsupportedError

ANNOTATION_KEYWORDS = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description"),
    *("default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
}
"""Keywords that do not restrict values."""

APPLICATOR_KEYWORDS = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords that apply other schemas to the same value."""

TYPE_KEYWORDS: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "dependentRequired", "propertyNames"),
    },
}
"""Supported keywords, by the type of the value."""

SUPPORTED_KEYWORDS = {"type", "enum", "const", "not", *APPLICATOR_KEYWORDS}.union(
    *TYPE_KEYWORDS.values()
)

USE_ANY_OF = "use anyOf with a schema for each case"
USE_PREFIX_ITEMS = "use prefixItems for items that must be there"
USE_LOCAL_REF = "use $ref to a part of the schema (#/…)"
USE_LISTED_VALUES = "list the values that are allowed"

KEYWORD_ALTERNATIVES = {
    "if": USE_ANY_OF,
    "then": USE_ANY_OF,
    "else": USE_ANY_OF,
    "dependentSchemas": USE_ANY_OF,
    "dependencies": "use dependentRequired",
    "contains": USE_PREFIX_ITEMS,
    "minContains": USE_PREFIX_ITEMS,
    "maxContains": USE_PREFIX_ITEMS,
    "additionalItems": "use items beside prefixItems",
    "unevaluatedItems": "use items: false",
    "unevaluatedProperties": "use additionalProperties: false",
    "$dynamicRef": USE_LOCAL_REF,
    "$dynamicAnchor": USE_LOCAL_REF,
    "$recursiveRef": USE_LOCAL_REF,
    "nullable": "add null to type",
    "any other keyword": "leave it out",
    "$ref to another document": USE_LOCAL_REF,
    "oneOf of schemas that a value may fulfil at once": "use anyOf, or a required const in each",
    "not of other than type, enum, const": USE_LISTED_VALUES,
    "enum or const of arrays or objects beside their keywords": USE_LISTED_VALUES,
    "any other format": "use pattern",
    "pattern with look-around, back-references, \\b, flags": "write each case, as in [aA] for (?i)",
    "multipleOf with a fraction other than halves, quarters …": "use an integer of smaller units",
    "multipleOf above 5000, or of several together": "use larger units",
    "bounds with more than 20 zeros after the point": "use a rounder number",
    "uniqueItems of more than 6 values": "use an object with a property for each, or maxItems: 1",
    "minProperties that takes two names without properties": "use properties and required",
    "patternProperties with more than 4 patterns": "join them with |",
}
"""Unsupported constructs, and what to write instead."""


def refuse_keyword(what: str, at: str, kind: str | None = None) -> NoReturn:
    """Raise `UnsupportedError` for a construct at a place; `kind` is its key in the table."""
    raise UnsupportedError(f"{what} at {at} is not supported: {KEYWORD_ALTERNATIVES[kind or what]}")


def require_type(value: Any, kind: Any, what: str) -> Any:
    """Return a value of a type.

    Raises:
        ValueError: if it has another type, with the name of the keyword.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what} is invalid: {value!r}")
    return value
