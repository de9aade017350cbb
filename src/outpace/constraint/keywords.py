"""Keywords of JSON schemas: supported, ignored and unsupported ones, and alternatives to these."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, count, product
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote

from outpace.constraint.pattern import TooLargeError, UnsupportedError

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
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""Supported keywords, by the type of the value."""

SUPPORTED_KEYWORDS = {"type", "enum", "const", *APPLICATOR_KEYWORDS}.union(*TYPE_KEYWORDS.values())

USE_NAMES = "use properties, or additionalProperties for any names"
USE_ANY_OF = "use anyOf with a schema for each case"
USE_PREFIX_ITEMS = "use prefixItems for items that must be there"
USE_LOCAL_REF = "use $ref to a part of the schema (#/…)"
USE_SCALARS = "list texts, numbers, booleans or null"
USE_LISTED_VALUES = "list the values that are allowed"

KEYWORD_ALTERNATIVES = {
    "if": USE_ANY_OF,
    "then": USE_ANY_OF,
    "else": USE_ANY_OF,
    "dependentSchemas": USE_ANY_OF,
    "dependencies": USE_ANY_OF,
    "dependentRequired": USE_ANY_OF,
    "not": USE_LISTED_VALUES,
    "patternProperties": USE_NAMES,
    "propertyNames": USE_NAMES,
    "minProperties": USE_NAMES,
    "maxProperties": USE_NAMES,
    "uniqueItems": "leave it out, or use an object with a property for each",
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
    "enum or const of arrays or objects": USE_SCALARS,
    "any other format": "use pattern",
    "pattern with look-around, back-references, \\b, flags": "write each case, as in [aA] for (?i)",
    "multipleOf with a fraction": "use an integer of smaller units",
    "multipleOf above 5000, or of several together": "use larger units",
    "bounds with more than 20 zeros after the point": "use a rounder number",
}
"""Unsupported constructs, and what to write instead."""


def refuse_keyword(what: str, at: str, kind: str | None = None) -> NoReturn:
    """Raise `UnsupportedError` for a construct at a place; `kind` is its key in the table."""
    raise UnsupportedError(f"{what} at {at} is not supported: {KEYWORD_ALTERNATIVES[kind or what]}")


def require_type(value: Any, kind: Any, what: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what} is invalid: {value!r}")
    return value


MAX_SCHEMA_VALUES = 20_000
"""Maximum values that a schema describes; those of a definition count for each use."""

MAX_REF_RECURSION = 3
"""Maximum nesting of a definition in itself."""


class SubSchema(NamedTuple):
    """A part of a schema, its place, and the references that lead to it."""

    value: Any
    at: str
    refs: tuple[str, ...] = ()

    def descend(self, *steps: str | int) -> SubSchema:
        value = self.value
        for step in steps:
            value = value[step]
        return SubSchema(value, "/".join([self.at, *map(str, steps)]), self.refs)


SchemaCase = tuple[SubSchema, ...]
"""Keywords of one or more schemas that all hold for a value, without applicators."""


@dataclass(frozen=True, slots=True)
class SchemaReader:
    """Reads which keywords hold for a value."""

    root: Any
    values_read: Iterator[int] = field(default_factory=count)

    def count_value(self) -> None:
        if next(self.values_read) == MAX_SCHEMA_VALUES:
            raise TooLargeError(f"it is too large: it has more than {MAX_SCHEMA_VALUES} values")

    def combine_schemas(self, schemas: Iterable[SubSchema]) -> list[SchemaCase]:
        """Return the cases of a value for which all schemas hold; it is valid if one case holds."""
        found: list[SchemaCase] = [()]
        for schema in schemas:
            found = self.cross_cases(found, self.schema_cases(schema))
        return found

    def cross_cases(self, one: list[SchemaCase], other: list[SchemaCase]) -> list[SchemaCase]:
        """Return all combinations of two lists of cases with a common type."""
        pairs = []
        for left, right in product(one, other):
            self.count_value()
            if declared_types(left + right):
                pairs.append(left + right)
        return pairs

    def schema_cases(self, schema: SubSchema) -> list[SchemaCase]:
        self.count_value()
        if isinstance(schema.value, bool):
            return [()] if schema.value else []
        if not isinstance(schema.value, Mapping):
            raise ValueError(f"{schema.value!r} at {schema.at} is not a schema")
        for name in schema.value:
            if name in KEYWORD_ALTERNATIVES:
                refuse_keyword(name, schema.at)
            if name not in SUPPORTED_KEYWORDS and name not in ANNOTATION_KEYWORDS:
                refuse_keyword(name, schema.at, "any other keyword")
        words = {
            name: rule
            for name, rule in schema.value.items()
            if name not in ANNOTATION_KEYWORDS and name not in APPLICATOR_KEYWORDS
        }
        place = "properties" if "properties" in words else next(iter(words), None)
        found: list[SchemaCase] = [()]
        for name in schema.value:  # in this order, in which properties are written
            if name == place:
                found = self.cross_cases(found, [(schema._replace(value=words),)])
            elif name in APPLICATOR_KEYWORDS:
                found = self.cross_cases(found, self.applicator_cases(name, schema))
        return found

    def applicator_cases(self, name: str, schema: SubSchema) -> list[SchemaCase]:
        rule, at, refs = schema.value[name], schema.at, schema.refs
        if name == "$ref":
            if refs.count(rule) == MAX_REF_RECURSION:
                return []
            return self.schema_cases(
                SubSchema(resolve_reference(self.root, rule, at), str(rule), (*refs, rule))
            )
        require_type(rule, list, f"{name} at {at}")
        parts = [schema.descend(name, number) for number in range(len(rule))]
        if name == "allOf":
            return self.combine_schemas(parts)
        each = [self.schema_cases(part) for part in parts]
        if name == "oneOf" and not self.are_disjoint(each):
            refuse_keyword("oneOf", at, "oneOf of schemas that a value may fulfil at once")
        return [case for cases in each for case in cases]

    def are_disjoint(self, each: list[list[SchemaCase]]) -> bool:
        """Return whether types and constants show that no value has cases of two schemas."""
        return all(
            self.excludes_both(left, right)
            for one, other in combinations(each, 2)
            for left, right in product(one, other)
        )

    def excludes_both(self, one: SchemaCase, other: SchemaCase) -> bool:
        self.count_value()
        both = one + other
        if not declared_types(both) or listed_values(both) == []:
            return True
        if declared_types(both) != {"object"}:
            return False
        return any(
            all(
                self.excludes_both(left, right)
                for left in self.combine_schemas(property_subschemas(one, name))
                for right in self.combine_schemas(property_subschemas(other, name))
            )
            for name in required_names(both)
        )


def declared_types(case: SchemaCase) -> set[str]:
    found = set(TYPE_KEYWORDS)
    for schema in case:
        if "type" in schema.value:
            found &= named_types(schema)
    return found


def written_types(case: SchemaCase) -> list[str]:
    """Return the types of values to write."""
    # These are the declared ones, or by default the first that has keywords.
    found = declared_types(case)
    if not any("type" in schema.value for schema in case):
        words = {name for schema in case for name in schema.value}
        some = next(
            (kind for kind in TYPE_KEYWORDS if kind in found and TYPE_KEYWORDS[kind] & words), None
        )
        found = found if some is None else {some}
    return [kind for kind in TYPE_KEYWORDS if kind in found]


def named_types(schema: SubSchema) -> set[str]:
    """Return the types that a schema names; `number` includes integers."""
    value = schema.value["type"]
    names = [value] if isinstance(value, str) else require_type(value, list, f"type at {schema.at}")
    for name in names:
        if not isinstance(name, str) or name not in TYPE_KEYWORDS:
            raise ValueError(f"{name!r} at {schema.at} is not a type")
    return {*names, *(["integer"] if "number" in names else [])}


def listed_values(case: SchemaCase) -> list[Any] | None:
    """Return the values that a case lists and allows; None if it lists none."""
    found: list[Any] | None = None
    for schema in case:
        own = []
        if "enum" in schema.value:
            own.append(require_type(schema.value["enum"], list, f"enum at {schema.at}"))
        if "const" in schema.value:
            own.append([schema.value["const"]])
        for values in own:
            if any(isinstance(value, list | dict) for value in values):
                what = "enum" if values is schema.value.get("enum") else "const"
                refuse_keyword(what, schema.at, "enum or const of arrays or objects")
            keys = {canonical_text(value) for value in values}
            found = [v for v in (values if found is None else found) if canonical_text(v) in keys]
    if found is None:
        return None
    allowed = declared_types(case)
    return [value for value in found if value_type(value) in allowed]


def canonical_text(value: Any) -> str:
    """Return a string that is equal for equal values, such as 1 and 1.0."""
    return json.dumps(int(value) if isinstance(value, float) and value == int(value) else value)


def value_type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == int(value) else "number"
    return "string"


def required_names(case: SchemaCase) -> list[str]:
    rules = [(each.value.get("required", []), f"required at {each.at}") for each in case]
    return list(
        dict.fromkeys(
            require_type(name, str, at)
            for rule, at in rules
            for name in require_type(rule, list, at)
        )
    )


def named_properties(schema: SubSchema) -> dict[str, Any]:
    found: dict[str, Any] = require_type(
        schema.value.get("properties", {}), dict, f"properties at {schema.at}"
    )
    return found


def property_subschemas(case: SchemaCase, name: str) -> list[SubSchema]:
    found = []
    for schema in case:
        if name in named_properties(schema):
            found.append(schema.descend("properties", name))
        elif "additionalProperties" in schema.value:
            found.append(schema.descend("additionalProperties"))
    return found


def count_bounds(case: SchemaCase, what: str) -> tuple[int, int | None]:
    """Return the largest `min` and the smallest `max` of a count; None without a `max`."""
    found: dict[str, list[int]] = {"min": [0], "max": []}
    for schema in case:
        for side, bounds in found.items():
            if (name := side + what) in schema.value:
                number = require_type(schema.value[name], int | float, f"{name} at {schema.at}")
                if number != int(number):
                    raise ValueError(f"{name} at {schema.at} must be an integer, got {number!r}")
                bounds.append(int(number))
    return max(found["min"]), min(found["max"], default=None)


def resolve_reference(root: Any, reference: Any, at: str) -> Any:
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        refuse_keyword(f"$ref to {reference!r}", at, "$ref to another document")
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"$ref at {at} names {reference!r}, which does not exist") from None
    return found
