"""Keywords of a JSON schema, combined into cases that hold for one value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, count, product
from typing import Any, NamedTuple
from urllib.parse import unquote

from outpace.constraint.keywords import INSTEAD, JOINS, KEYWORDS, NOTES, SUPPORTED, need, refuse
from outpace.constraint.pattern import TooLarge

MOST_VALUES = 20_000
"""Maximum values that a schema describes; those of a definition count for each use."""

RECURSION = 3
"""Maximum nesting of a definition in itself."""


class Schema(NamedTuple):
    """A part of a schema, its place, and the references that lead to it."""

    value: Any
    at: str
    refs: tuple[str, ...] = ()

    def part(self, *steps: str | int) -> Schema:
        """Return a part of it."""
        value = self.value
        for step in steps:
            value = value[step]
        return Schema(value, "/".join([self.at, *map(str, steps)]), self.refs)


Case = tuple[Schema, ...]
"""Keywords of one or more schemas that all hold for a value, without applicators."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Reads which keywords hold for a value."""

    root: Any
    turns: Iterator[int] = field(default_factory=count)

    def count(self) -> None:
        """Count a value.

        Raises:
            TooLargeError: if there are too many.
        """
        if next(self.turns) == MOST_VALUES:
            raise TooLarge(f"it is too large: it has more than {MOST_VALUES} values")

    def cases(self, schemas: Iterable[Schema]) -> list[Case]:
        """Return the cases of a value for which all schemas hold; it is valid if one case holds.

        Raises:
            ValueError: if a schema is invalid.
            UnsupportedError: if a keyword is not supported.
        """
        found: list[Case] = [()]
        for schema in schemas:
            found = self.crossed(found, self.own(schema))
        return found

    def crossed(self, one: list[Case], other: list[Case]) -> list[Case]:
        """Return all combinations of two lists of cases with a common type."""
        pairs = []
        for left, right in product(one, other):
            self.count()
            if declared(left + right):
                pairs.append(left + right)
        return pairs

    def own(self, schema: Schema) -> list[Case]:
        """Return the cases of one schema."""
        self.count()
        if isinstance(schema.value, bool):
            return [()] if schema.value else []
        if not isinstance(schema.value, Mapping):
            raise ValueError(f"{schema.value!r} at {schema.at} is not a schema")
        for name in schema.value:
            if name in INSTEAD:
                refuse(name, schema.at)
            if name not in SUPPORTED and name not in NOTES:
                refuse(name, schema.at, "any other keyword")
        words = {
            name: rule
            for name, rule in schema.value.items()
            if name not in NOTES and name not in JOINS
        }
        place = "properties" if "properties" in words else next(iter(words), None)
        found: list[Case] = [()]
        for name in schema.value:  # in this order, in which properties are written
            if name == place:
                found = self.crossed(found, [(schema._replace(value=words),)])
            elif name in JOINS:
                found = self.crossed(found, self.joined(name, schema))
        return found

    def joined(self, name: str, schema: Schema) -> list[Case]:
        """Return the cases of the schemas that a keyword applies."""
        rule, at, refs = schema.value[name], schema.at, schema.refs
        if name == "$ref":
            if refs.count(rule) == RECURSION:
                return []
            return self.own(Schema(resolved(self.root, rule, at), str(rule), (*refs, rule)))
        need(rule, list, f"{name} at {at}")
        parts = [schema.part(name, number) for number in range(len(rule))]
        if name == "allOf":
            return self.cases(parts)
        each = [self.own(part) for part in parts]
        if name == "oneOf" and not self.disjoint(each):
            refuse("oneOf", at, "oneOf of schemas that a value may fulfil at once")
        return [case for cases in each for case in cases]

    def disjoint(self, each: list[list[Case]]) -> bool:
        """Return whether types and constants show that no value has cases of two schemas."""
        return all(
            self.apart(left, right)
            for one, other in combinations(each, 2)
            for left, right in product(one, other)
        )

    def apart(self, one: Case, other: Case) -> bool:
        """Return whether no value has both cases: by type, constant, or that of a property."""
        self.count()
        both = one + other
        if not declared(both) or listed(both) == []:
            return True
        if declared(both) != {"object"} or any("patternProperties" in each.value for each in both):
            return False
        return any(
            all(
                self.apart(left, right)
                for left in self.cases(properties(one, name))
                for right in self.cases(properties(other, name))
            )
            for name in required(both)
        )


def declared(case: Case) -> set[str]:
    """Return the types that `type` and `not` allow; an integer has a separate type."""
    found = set(KEYWORDS)
    for schema in case:
        if "type" in schema.value:
            found &= types(schema)
        found -= excluded(schema)[0]
    return found


def kinds(case: Case) -> list[str]:
    """Return the types of values to write.

    These are the declared ones, or by default the first that has keywords.
    """
    found = declared(case)
    if not any("type" in schema.value for schema in case):
        words = {name for schema in case for name in schema.value}
        some = next((kind for kind in KEYWORDS if kind in found and KEYWORDS[kind] & words), None)
        found = found if some is None else {some}
    return [kind for kind in KEYWORDS if kind in found]


def types(schema: Schema) -> set[str]:
    """Return the types that a schema names; `number` includes integers."""
    value = schema.value["type"]
    names = [value] if isinstance(value, str) else need(value, list, f"type at {schema.at}")
    for name in names:
        if not isinstance(name, str) or name not in KEYWORDS:
            raise ValueError(f"{name!r} at {schema.at} is not a type")
    return {*names, *(["integer"] if "number" in names else [])}


def excluded(schema: Schema) -> tuple[set[str], list[Any]]:
    """Return the types and values that `not` excludes."""
    rule, at = schema.value.get("not", False), f"{schema.at}/not"
    if isinstance(rule, bool):
        return (set(KEYWORDS) if rule else set()), []
    words = set(need(rule, dict, f"not at {schema.at}")) - NOTES
    if "anyOf" in words and len(words) == 1:
        parts = [
            excluded(Schema({"not": part}, at))
            for part in need(rule["anyOf"], list, f"anyOf at {at}")
        ]
        return {k for names, _ in parts for k in names}, [v for _, each in parts for v in each]
    if not words <= {"type", "enum", "const"}:
        refuse("not", schema.at, "not of other than type, enum, const")
    own = (Schema({name: rule[name] for name in words}, at),)
    values = listed(own)
    if values is not None:
        return set(), values
    return (types(own[0]) if words else set(KEYWORDS)), []


def listed(case: Case) -> list[Any] | None:
    """Return the values that a case lists and allows; None if it lists none."""
    found: list[Any] | None = None
    for schema in case:
        own = []
        if "enum" in schema.value:
            own.append(need(schema.value["enum"], list, f"enum at {schema.at}"))
        if "const" in schema.value:
            own.append([schema.value["const"]])
        for values in own:
            keys = {same(value) for value in values}
            found = [v for v in (values if found is None else found) if same(v) in keys]
    if found is None:
        return None
    allowed = declared(case)
    out = {same(value) for schema in case for value in excluded(schema)[1]}
    return [value for value in found if same(value) not in out and kind_of(value) in allowed]


def same(value: Any) -> str:
    """Return a text that is equal for equal values: 1 and 1.0, and keys in any order."""
    return json.dumps(plain(value), sort_keys=True)


def plain(value: Any) -> Any:
    """Return a value in which integral floats are integers."""
    match value:
        case float() if value == int(value):
            return int(value)
        case list():
            return [plain(each) for each in value]
        case dict():
            return {name: plain(each) for name, each in value.items()}
    return value


def kind_of(value: Any) -> str:
    """Return the type of a value; an integer has a separate type."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == int(value) else "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def required(case: Case) -> list[str]:
    """Return the names that an object must have, each once."""
    rules = [(each.value.get("required", []), f"required at {each.at}") for each in case]
    return list(
        dict.fromkeys(need(name, str, at) for rule, at in rules for name in need(rule, list, at))
    )


def properties(case: Case, name: str) -> list[Schema]:
    """Return the schemas of a property by name, without those of patterns."""
    found = []
    for schema in case:
        named = need(schema.value.get("properties", {}), dict, f"properties at {schema.at}")
        if name in named:
            found.append(schema.part("properties", name))
        elif "additionalProperties" in schema.value:
            found.append(schema.part("additionalProperties"))
    return found


def counts(case: Case, what: str) -> tuple[int, int | None]:
    """Return the largest `min` and the smallest `max` of a count; None without a `max`."""
    found: dict[str, list[int]] = {"min": [0], "max": []}
    for schema in case:
        for side, bounds in found.items():
            if (name := side + what) in schema.value:
                number = need(schema.value[name], int | float, f"{name} at {schema.at}")
                if number != int(number):
                    raise ValueError(f"{name} at {schema.at} must be an integer, got {number!r}")
                bounds.append(int(number))
    return max(found["min"]), min(found["max"], default=None)


def resolved(root: Any, reference: Any, at: str) -> Any:
    """Return the part of a schema that a reference names."""
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        refuse(f"$ref to {reference!r}", at, "$ref to another document")
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"$ref at {at} names {reference!r}, which does not exist") from None
    return found
