"""JSON schemas as automata over bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import inf
from typing import Any

from outpace.constraint.dfa import MAX_DETERMINIZE_STEPS, Dfa, StepBudget
from outpace.constraint.keywords import (
    SchemaCase,
    SchemaReader,
    SubSchema,
    count_bounds,
    listed_values,
    named_properties,
    property_subschemas,
    require_type,
    required_names,
    written_types,
)
from outpace.constraint.numbers import number_fits, number_piece
from outpace.constraint.pattern import TextRoom, check_room
from outpace.constraint.pieces import (
    COLON,
    COMMA,
    NO_TEXT,
    ChoicePiece,
    DfaPiece,
    JsonPiece,
    LiteralPiece,
    ObjectMember,
    ObjectPiece,
    RepeatPiece,
    SequencePiece,
    join_with_commas,
    piece_dfa,
    repeat_with_commas,
)
from outpace.constraint.strings import string_fits, string_piece

MAX_OPEN_DEPTH = 2
"""Maximum nesting of arrays and objects where a schema allows any value."""

LARGE_COUNT = 64
"""Upper counts above this are omitted if they are enforced separately."""

MAX_SCHEMA_DIGITS = 40
"""Maximum digits of a number in a schema."""

MAX_PART_STEPS = 2 * MAX_DETERMINIZE_STEPS
"""Maximum NFA states visited for all strings and numbers of a schema; takes some seconds."""

MAX_SCHEMA_DEPTH = 100
"""Maximum nesting of lists and mappings in a schema."""


def schema_dfa(schema: Any, room: TextRoom = None, *, loose: bool = False) -> Dfa:
    """Return the automaton of the JSON documents that a schema accepts.

    Properties are in order, with at most one space after commas and colons. With `loose`, strings
    and arrays may exceed a large upper count.
    """
    writer = SchemaWriter(SchemaReader(schema), StepBudget(MAX_PART_STEPS), loose)
    piece = writer.write_value([SubSchema(schema, "#")])
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
    budget: StepBudget
    loose: bool = False

    def write_value(self, schemas: Iterable[SubSchema], depth: int = MAX_OPEN_DEPTH) -> JsonPiece:
        """Return the piece of a value for which all schemas hold; `depth` limits open values."""
        cases = self.rules.combine_schemas(schemas)
        parts = [self.write_case(case) if case else any_value(depth) for case in cases]
        return parts[0] if len(parts) == 1 else ChoicePiece(parts)

    def write_case(self, case: SchemaCase) -> JsonPiece:
        values = listed_values(case)
        if values is not None:
            return listed_piece([v for v in values if value_fits(v, case, self.budget)])
        return ChoicePiece([self.write_type(kind, case) for kind in written_types(case)])

    def write_type(self, kind: str, case: SchemaCase) -> JsonPiece:
        match kind:
            case "string":
                return string_piece(case, LARGE_COUNT if self.loose else None, self.budget)
            case "integer":
                covered = "number" in written_types(case)
                return NO_TEXT if covered else number_piece(case, is_whole=True, budget=self.budget)
            case "number":
                return number_piece(case, is_whole=False, budget=self.budget)
            case "boolean":
                return listed_piece([True, False])
            case "null":
                return listed_piece([None])
            case "array":
                return self.write_array(case)
        return self.write_object(case)

    def write_array(self, case: SchemaCase) -> JsonPiece:
        """Return the piece of an array: all items with a place, then any number of others."""
        least, most = count_bounds(case, "Items")
        if most is not None and most < least:
            return NO_TEXT
        size = max((len(prefix_schemas(schema)) for schema in case), default=0)
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

    def write_object(self, case: SchemaCase) -> JsonPiece:
        """Return the piece of an object: its named properties, or any if it names none."""
        required = required_names(case)
        names = dict.fromkeys(chain(*map(named_properties, case), required))
        members = []
        for name in names:
            part = self.write_value(property_subschemas(case, name), MAX_OPEN_DEPTH - 1)
            if part.min_width < inf or name in required:
                key = LiteralPiece(json.dumps(name, ensure_ascii=False))
                members.append(
                    ObjectMember(SequencePiece((key, COLON, part)), required=name in required)
                )
        if names:
            return ObjectPiece(members)
        part = self.write_value(property_subschemas(case, ""), MAX_OPEN_DEPTH - 1)
        others = SequencePiece((string_piece(()), COLON, part))
        return ObjectPiece((), others if part.min_width < inf else None)


def value_fits(value: Any, case: SchemaCase, budget: StepBudget) -> bool:
    match value:
        case None | bool():
            return True
        case str():
            return string_fits(value, case, budget)
    return number_fits(value, case)


def prefix_schemas(schema: SubSchema) -> list[Any]:
    found: list[Any] = require_type(
        schema.value.get("prefixItems", []), list, f"prefixItems at {schema.at}"
    )
    return found


def item_schemas(case: SchemaCase, place: int) -> list[SubSchema]:
    found = []
    for schema in case:
        if place < len(prefix_schemas(schema)):
            found.append(schema.descend("prefixItems", place))
        elif "items" in schema.value:
            found.append(schema.descend("items"))
    return found


def listed_piece(values: Sequence[Any]) -> JsonPiece:
    return DfaPiece(Dfa.from_texts(json.dumps(value, ensure_ascii=False) for value in values))


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
