"""JSON schemas as automata over bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from outpace.constraint.dfa import Dfa
from outpace.constraint.keywords import (
    TYPE_KEYWORDS,
    SchemaCase,
    SchemaReader,
    SubSchema,
    canonical_text,
    count_bounds,
    exclusions,
    listed_values,
    refuse_keyword,
    require_type,
    value_type,
    written_types,
)
from outpace.constraint.numbers import number_fits, number_piece
from outpace.constraint.objects import DistinctArrayPiece, object_piece
from outpace.constraint.pattern import TextRoom, check_room
from outpace.constraint.pieces import (
    COLON,
    COMMA,
    NO_TEXT,
    ChoicePiece,
    DfaPiece,
    JsonPiece,
    LiteralPiece,
    RepeatPiece,
    SequencePiece,
    join_with_commas,
    piece_dfa,
    repeat_with_commas,
)
from outpace.constraint.strings import string_fits, string_piece

MAX_OPEN_DEPTH = 2
"""Maximum nesting of arrays and objects where a schema allows any value."""

MAX_DISTINCT_VALUES = 6
"""Maximum values of an array of distinct values."""


LARGE_COUNT = 64
"""Upper counts above this are omitted if they are enforced separately."""

MAX_SCHEMA_DIGITS = 40
"""Maximum digits of a number in a schema."""

MAX_SCHEMA_DEPTH = 100
"""Maximum nesting of lists and mappings in a schema."""


def schema_dfa(schema: Any, room: TextRoom = None, *, loose: bool = False) -> Dfa:
    """Return the automaton of the JSON documents that a schema accepts.

    Properties are in order, with at most one space after commas and colons. With `loose`, strings
    and arrays may exceed a large upper count.

    Raises:
        UnsupportedError: with the keyword and its place.
        TooLargeError: if the automaton is too large.
        ValueError: if the schema is invalid, unsatisfiable or clearly exceeds `room`.
    """
    piece = SchemaWriter(SchemaReader(schema), loose).write_value([SubSchema(schema, "#")])
    if piece.min_width < inf:
        check_room(int(piece.min_width), room)
        dfa = piece_dfa(piece)
        if len(dfa.table):
            return dfa
    raise ValueError("no text matches it")


def check_schema_limits(value: Any, at: str = "#", depth: int = 0) -> None:
    """Raise `ValueError` for numbers with too many digits and for deep nesting."""
    if depth > MAX_SCHEMA_DEPTH:
        raise ValueError(f"it is too large: it is nested more than {MAX_SCHEMA_DEPTH} deep")
    listed = enumerate(value) if isinstance(value, list) else ()
    for name, part in value.items() if isinstance(value, dict) else listed:
        if isinstance(part, int | float) and not abs(part) < 10**MAX_SCHEMA_DIGITS:
            raise ValueError(
                f"{name} at {at} must be a number of at most {MAX_SCHEMA_DIGITS} digits"
            )
        check_schema_limits(part, f"{at}/{name}", depth + 1)


@dataclass(frozen=True, slots=True)
class SchemaWriter:
    """Writes the values of a schema."""

    rules: SchemaReader
    loose: bool = False

    def write_value(self, schemas: Iterable[SubSchema], depth: int = MAX_OPEN_DEPTH) -> JsonPiece:
        """Return the piece of a value for which all schemas hold; `depth` limits open values."""
        cases = self.rules.combine_schemas(schemas)
        parts = [self.write_case(case) if case else any_value(depth) for case in cases]
        return parts[0] if len(parts) == 1 else ChoicePiece(parts)

    def write_case(self, case: SchemaCase) -> JsonPiece:
        values = listed_values(case)
        if values is not None:
            return listed_piece([value for value in values if self.value_fits(value, case)])
        return ChoicePiece([self.write_type(kind, case) for kind in written_types(case)])

    def write_type(self, kind: str, case: SchemaCase) -> JsonPiece:
        out = [value for schema in case for value in exclusions(schema)[1]]
        match kind:
            case "string":
                return string_piece(case, LARGE_COUNT if self.loose else None)
            case "integer":
                return (
                    NO_TEXT
                    if "number" in written_types(case)
                    else number_piece(case, is_whole=True)
                )
            case "number":
                if "integer" not in written_types(case):
                    refuse_keyword("not", case[0].at, "not of other than type, enum, const")
                return number_piece(case, is_whole=False)
            case "boolean" | "null":
                values = [None] if kind == "null" else [True, False]
                return listed_piece(
                    [v for v in values if canonical_text(v) not in map(canonical_text, out)]
                )
        if any(isinstance(value, list if kind == "array" else dict) for value in out):
            refuse_keyword("not", case[0].at, "not of other than type, enum, const")
        return (
            self.write_array(case)
            if kind == "array"
            else object_piece(case, self.write_value, MAX_OPEN_DEPTH - 1)
        )

    def value_fits(self, value: Any, case: SchemaCase) -> bool:
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
            for word in sorted(TYPE_KEYWORDS[kind] & set(schema.value)):
                refuse_keyword(
                    f"{word} next to a listed {kind}",
                    schema.at,
                    "enum or const of arrays or objects beside their keywords",
                )
        return True

    def write_array(self, case: SchemaCase) -> JsonPiece:
        """Return the piece of an array: all items with a place, then any number of others."""
        least, most = count_bounds(case, "Items")
        if most is not None and most < least:
            return NO_TEXT
        size = max((len(prefix_schemas(schema)) for schema in case), default=0)
        if has_unique_items(case) and (most is None or most > 1):
            return self.write_distinct_array(case, size, least, most)
        front = [
            self.write_value(item_schemas(case, place), MAX_OPEN_DEPTH - 1) for place in range(size)
        ][:most]
        rest = self.write_value(item_schemas(case, size), MAX_OPEN_DEPTH - 1)
        if self.loose and most is not None and most > LARGE_COUNT:
            most = None
        least = max(least - len(front), 0)
        most = None if most is None else most - len(front)
        if front and not any("items" in schema.value for schema in case):
            most = least
        if not front:
            return SequencePiece(
                (LiteralPiece("["), repeat_with_commas(rest, least, most), LiteralPiece("]"))
            )
        return SequencePiece(
            (
                LiteralPiece("["),
                join_with_commas(front),
                RepeatPiece(SequencePiece((COMMA, rest)), least, most),
                LiteralPiece("]"),
            )
        )

    def write_distinct_array(
        self, case: SchemaCase, size: int, least: int, most: int | None
    ) -> JsonPiece:
        """Return the piece of an array of distinct values, if these are few."""
        found = {} if size else self.finite_values(item_schemas(case, 0))
        if size or found is None or len(found) > MAX_DISTINCT_VALUES:
            refuse_keyword("uniqueItems", case[0].at, "uniqueItems of more than 6 values")
        return NO_TEXT if len(found) < least else DistinctArrayPiece([*found.values()], least, most)

    def finite_values(self, schemas: Iterable[SubSchema]) -> dict[str, JsonPiece] | None:
        """Return the distinct values for which all schemas hold, or None if they are not listed."""
        found: list[Any] = []
        for case in self.rules.combine_schemas(schemas):
            values = listed_values(case)
            if values is None and set(written_types(case)) <= {"null", "boolean"}:
                values = [v for v in (None, True, False) if value_type(v) in written_types(case)]
                out = {canonical_text(value) for schema in case for value in exclusions(schema)[1]}
                values = [value for value in values if canonical_text(value) not in out]
            if values is None:
                return None
            found += [value for value in values if self.value_fits(value, case)]
        return {canonical_text(value): constant_piece(value) for value in found}


def prefix_schemas(schema: SubSchema) -> list[Any]:
    found: list[Any] = require_type(
        schema.value.get("prefixItems", []), list, f"prefixItems at {schema.at}"
    )
    return found


def item_schemas(case: SchemaCase, place: int) -> list[SubSchema]:
    """Return the schemas of the item at a place."""
    found = []
    for schema in case:
        if place < len(prefix_schemas(schema)):
            found.append(schema.descend("prefixItems", place))
        elif "items" in schema.value:
            found.append(schema.descend("items"))
    return found


def has_unique_items(case: SchemaCase) -> bool:
    for schema in case:
        if not isinstance(schema.value.get("uniqueItems", False), bool):
            raise ValueError(f"uniqueItems at {schema.at} must be true or false")
    return any(schema.value.get("uniqueItems") for schema in case)


def listed_piece(values: Sequence[Any]) -> JsonPiece:
    if any(isinstance(value, list | dict) for value in values):
        return ChoicePiece([constant_piece(value) for value in values])
    return DfaPiece(Dfa.from_texts(json.dumps(value, ensure_ascii=False) for value in values))


def constant_piece(value: Any) -> JsonPiece:
    match value:
        case list():
            return SequencePiece(
                (
                    LiteralPiece("["),
                    join_with_commas([constant_piece(each) for each in value]),
                    LiteralPiece("]"),
                )
            )
        case dict():
            parts = [
                SequencePiece((constant_piece(name), COLON, constant_piece(part)))
                for name, part in value.items()
            ]
            return SequencePiece((LiteralPiece("{"), join_with_commas(parts), LiteralPiece("}")))
    return LiteralPiece(json.dumps(value, ensure_ascii=False))


@cache
def any_value(depth: int) -> JsonPiece:
    scalars = ChoicePiece(
        (
            LiteralPiece("true"),
            LiteralPiece("false"),
            LiteralPiece("null"),
            number_piece((), is_whole=False),
        )
    )
    if depth <= 0:
        return ChoicePiece((scalars, string_piece(())))
    inner = any_value(depth - 1)
    pair = SequencePiece((string_piece(()), COLON, inner))
    array = SequencePiece(
        (LiteralPiece("["), repeat_with_commas(inner, 0, None), LiteralPiece("]"))
    )
    return ChoicePiece(
        (
            scalars,
            string_piece(()),
            array,
            SequencePiece(
                (LiteralPiece("{"), repeat_with_commas(pair, 0, None), LiteralPiece("}"))
            ),
        )
    )
