"""JSON schemas as automata over bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from outpace.constraint.dfa import Dfa
from outpace.constraint.keywords import KEYWORDS, need, refuse
from outpace.constraint.members import Distinct
from outpace.constraint.numbers import number, number_fits
from outpace.constraint.objects import object_of
from outpace.constraint.pattern import Room, check_room
from outpace.constraint.pieces import (
    IS,
    NEXT,
    NOTHING,
    Chain,
    Either,
    Leaf,
    Piece,
    Text,
    Times,
    dfa_of,
    separated,
    several,
)
from outpace.constraint.rules import (
    Case,
    Rules,
    Schema,
    counts,
    excluded,
    kind_of,
    kinds,
    listed,
    same,
)
from outpace.constraint.strings import string, string_fits

DEPTH = 2
"""Maximum nesting of arrays and objects where a schema allows any value."""

MOST_DIFFERENT = 6
"""Maximum values of an array of distinct values."""


LOOSE = 64
"""Upper counts above this are omitted if they are enforced separately."""


def schema_dfa(schema: Any, room: Room = None, *, loose: bool = False) -> Dfa:
    """Return the automaton of the JSON texts that a schema accepts.

    Properties are in order, with at most one space after commas and colons. With `loose`, strings
    and arrays may exceed a large upper count.

    Raises:
        UnsupportedError: with the keyword and its place.
        TooLargeError: if the automaton is too large.
        ValueError: if the schema is invalid, unsatisfiable or clearly exceeds `room`.
    """
    piece = Writer(Rules(schema), loose).value([Schema(schema, "#")])
    if piece.width < inf:
        check_room(int(piece.width), room)
        dfa = dfa_of(piece)
        if len(dfa.table):
            return dfa
    raise ValueError("no text matches it")


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the values of a schema."""

    rules: Rules
    loose: bool = False

    def value(self, schemas: Iterable[Schema], depth: int = DEPTH) -> Piece:
        """Return the piece of a value for which all schemas hold; `depth` limits open values."""
        cases = self.rules.cases(schemas)
        parts = [self.case(case) if case else anything(depth) for case in cases]
        return parts[0] if len(parts) == 1 else Either(parts)

    def case(self, case: Case) -> Piece:
        """Return the piece of a value of one case."""
        values = listed(case)
        if values is not None:
            return one_of([value for value in values if self.fits(value, case)])
        return Either([self.typed(kind, case) for kind in kinds(case)])

    def typed(self, kind: str, case: Case) -> Piece:
        """Return the piece of a value of one type."""
        out = [value for schema in case for value in excluded(schema)[1]]
        match kind:
            case "string":
                return string(case, LOOSE if self.loose else None)
            case "integer":
                return NOTHING if "number" in kinds(case) else number(case, is_whole=True)
            case "number":
                if "integer" not in kinds(case):
                    refuse("not", case[0].at, "not of other than type, enum, const")
                return number(case, is_whole=False)
            case "boolean" | "null":
                values = [None] if kind == "null" else [True, False]
                return one_of([v for v in values if same(v) not in map(same, out)])
        if any(isinstance(value, list if kind == "array" else dict) for value in out):
            refuse("not", case[0].at, "not of other than type, enum, const")
        return self.array(case) if kind == "array" else object_of(case, self.value, DEPTH - 1)

    def fits(self, value: Any, case: Case) -> bool:
        """Return whether a listed value of the right type satisfies the other keywords."""
        match value:
            case None | bool():
                return True
            case str():
                return string_fits(value, case)
            case int() | float():
                return number_fits(value, case)
        kind = "array" if isinstance(value, list) else "object"
        for schema in case:
            for word in sorted(KEYWORDS[kind] & set(schema.value)):
                refuse(
                    f"{word} next to a listed {kind}",
                    schema.at,
                    "enum or const of arrays or objects beside their keywords",
                )
        return True

    def array(self, case: Case) -> Piece:
        """Return the piece of an array: all items with a place, then any number of others."""
        least, most = counts(case, "Items")
        if most is not None and most < least:
            return NOTHING
        size = max((len(prefix(schema)) for schema in case), default=0)
        if unique(case) and (most is None or most > 1):
            return self.distinct(case, size, least, most)
        front = [self.value(items(case, place), DEPTH - 1) for place in range(size)][:most]
        rest = self.value(items(case, size), DEPTH - 1)
        if self.loose and most is not None and most > LOOSE:
            most = None
        least = max(least - len(front), 0)
        most = None if most is None else most - len(front)
        if front and not any("items" in schema.value for schema in case):
            most = least
        if not front:
            return Chain((Text("["), several(rest, least, most), Text("]")))
        return Chain(
            (Text("["), separated(front), Times(Chain((NEXT, rest)), least, most), Text("]"))
        )

    def distinct(self, case: Case, size: int, least: int, most: int | None) -> Piece:
        """Return the piece of an array of distinct values, if these are few."""
        found = {} if size else self.finite(items(case, 0))
        if size or found is None or len(found) > MOST_DIFFERENT:
            refuse("uniqueItems", case[0].at, "uniqueItems of more than 6 values")
        return NOTHING if len(found) < least else Distinct([*found.values()], least, most)

    def finite(self, schemas: Iterable[Schema]) -> dict[str, Piece] | None:
        """Return the distinct values for which all schemas hold, or None if they are not listed."""
        found: list[Any] = []
        for case in self.rules.cases(schemas):
            values = listed(case)
            if values is None and set(kinds(case)) <= {"null", "boolean"}:
                values = [v for v in (None, True, False) if kind_of(v) in kinds(case)]
                out = {same(value) for schema in case for value in excluded(schema)[1]}
                values = [value for value in values if same(value) not in out]
            if values is None:
                return None
            found += [value for value in values if self.fits(value, case)]
        return {same(value): constant(value) for value in found}


def prefix(schema: Schema) -> list[Any]:
    """Return the schemas of the first items."""
    found: list[Any] = need(
        schema.value.get("prefixItems", []), list, f"prefixItems at {schema.at}"
    )
    return found


def items(case: Case, place: int) -> list[Schema]:
    """Return the schemas of the item at a place."""
    found = []
    for schema in case:
        if place < len(prefix(schema)):
            found.append(schema.part("prefixItems", place))
        elif "items" in schema.value:
            found.append(schema.part("items"))
    return found


def unique(case: Case) -> bool:
    """Return whether all items must differ."""
    for schema in case:
        if not isinstance(schema.value.get("uniqueItems", False), bool):
            raise ValueError(f"uniqueItems at {schema.at} must be true or false")
    return any(schema.value.get("uniqueItems") for schema in case)


def one_of(values: Sequence[Any]) -> Piece:
    """Return the piece of one of given values."""
    if any(isinstance(value, list | dict) for value in values):
        return Either([constant(value) for value in values])
    return Leaf(Dfa.among(json.dumps(value, ensure_ascii=False) for value in values))


def constant(value: Any) -> Piece:
    """Return the piece of a given value, with its keys in order."""
    match value:
        case list():
            return Chain((Text("["), separated([constant(each) for each in value]), Text("]")))
        case dict():
            parts = [Chain((constant(name), IS, constant(part))) for name, part in value.items()]
            return Chain((Text("{"), separated(parts), Text("}")))
    return Text(json.dumps(value, ensure_ascii=False))


@cache
def anything(depth: int) -> Piece:
    """Return the piece of any value, with arrays and objects up to a depth."""
    scalars = Either((Text("true"), Text("false"), Text("null"), number((), is_whole=False)))
    if depth <= 0:
        return Either((scalars, string(())))
    inner = anything(depth - 1)
    pair = Chain((string(()), IS, inner))
    array = Chain((Text("["), several(inner, 0, None), Text("]")))
    return Either(
        (scalars, string(()), array, Chain((Text("{"), several(pair, 0, None), Text("}"))))
    )
