"""Objects of JSON schemas, as pieces of a string."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from math import inf
from typing import Any

from outpace.constraint.algebra import dfa_accepts, intersect_dfas, subtract_dfa
from outpace.constraint.dfa import Dfa
from outpace.constraint.keywords import refuse_keyword, require_type
from outpace.constraint.members import ObjectMember, ObjectPiece
from outpace.constraint.pieces import (
    COLON,
    NO_TEXT,
    ChoicePiece,
    DfaPiece,
    JsonPiece,
    LiteralPiece,
    SequencePiece,
    piece_dfa,
)
from outpace.constraint.rules import SchemaCase, SubSchema, count_bounds, required_names
from outpace.constraint.strings import quote_piece, search_pattern_dfa, string_piece

MAX_NAME_PATTERNS = 4
"""Maximum patterns of names; each combination of matches is a separate case."""

WriteValue = Callable[[Sequence[SubSchema], int], JsonPiece]
"""Writes a value for which some schemas hold, with this maximum depth where they leave it open."""


def object_piece(case: SchemaCase, value: WriteValue, depth: int) -> JsonPiece:
    """Return the piece of an object: its named properties in order, then others.

    Other properties are written only if the schema has patterns for them, has no named properties,
    or requires more than it names.
    """
    least, most = count_bounds(case, "Properties")
    needs, must = required_names_by_name(case), required_names(case)
    names = dict.fromkeys(chain(*map(named_properties, case), must, needs, *needs.values()))
    keys = allowed_names_dfa(case, value)
    members = []
    for name in names:
        fits = keys is None or dfa_accepts(keys, quoted_name(name).encode())
        part = value(property_schemas(case, name), depth) if fits else NO_TEXT
        if part.min_width < inf or name in must:
            members.append(
                ObjectMember(
                    name,
                    SequencePiece((LiteralPiece(quoted_name(name)), COLON, part)),
                    name in must,
                )
            )
    others = other_member(case, value, depth, keys, list(names), least > len(members))
    if others is not None and least > len(members) + 1:
        refuse_keyword(
            "minProperties", case[0].at, "minProperties that takes two names without properties"
        )
    if least <= len(must):
        least = 0
    if others is None and most is not None and most >= len(members):
        most = None
    return ObjectPiece(members=members, others=others, least=least, most=most, needs=needs)


def named_properties(schema: SubSchema) -> dict[str, Any]:
    """Return the properties that a schema names."""
    found: dict[str, Any] = require_type(
        schema.value.get("properties", {}), dict, f"properties at {schema.at}"
    )
    return found


def quoted_name(name: str) -> str:
    """Return a name as JSON writes it."""
    return json.dumps(name, ensure_ascii=False)


def required_names_by_name(case: SchemaCase) -> dict[str, frozenset[str]]:
    """Return the names that each name requires."""
    found: dict[str, frozenset[str]] = {}
    for schema in case:
        at = f"dependentRequired at {schema.at}"
        for name, others in require_type(
            schema.value.get("dependentRequired", {}), dict, at
        ).items():
            own = (require_type(other, str, at) for other in require_type(others, list, at))
            found[name] = found.get(name, frozenset()).union(own)
    return found


def allowed_names_dfa(case: SchemaCase, value: WriteValue) -> Dfa | None:
    """Return the automaton of quoted names that `propertyNames` allows, or None without it."""
    parts = [schema.descend("propertyNames") for schema in case if "propertyNames" in schema.value]
    if not parts:
        return None
    return piece_dfa(value([SubSchema({"type": "string"}, parts[0].at), *parts], 0))


def name_patterns(schema: SubSchema) -> list[str]:
    """Return the patterns of names in a schema."""
    found = require_type(
        schema.value.get("patternProperties", {}), dict, f"patternProperties at {schema.at}"
    )
    return list(found)


def matching_names_dfa(pattern: str, at: str, *, loose: bool) -> Dfa:
    """Return the automaton of quoted names that match a pattern, or if `loose` may match."""
    return piece_dfa(
        quote_piece(DfaPiece(search_pattern_dfa(pattern, f"{at}/patternProperties", loose=loose)))
    )


def property_schemas(case: SchemaCase, name: str) -> list[SubSchema]:
    """Return the schemas of a property by name and by each pattern that may match."""
    found, text = [], quoted_name(name).encode()
    for schema in case:
        is_named = name in named_properties(schema)
        if is_named:
            found.append(schema.descend("properties", name))
        for pattern in name_patterns(schema):
            if dfa_accepts(matching_names_dfa(pattern, schema.at, loose=True), text):
                found.append(schema.descend("patternProperties", pattern))
            # The validator jsonschema ignores an empty pattern.
            is_named = is_named or (
                pattern != ""
                and dfa_accepts(matching_names_dfa(pattern, schema.at, loose=False), text)
            )
        if not is_named and "additionalProperties" in schema.value:
            found.append(schema.descend("additionalProperties"))
    return found


def other_member(
    case: SchemaCase,
    value: WriteValue,
    depth: int,
    keys: Dfa | None,
    names: Sequence[str],
    more: bool,
) -> JsonPiece | None:
    """Return the piece of a member with another name, or None if there can be no such member.

    Args:
        case: keywords of the object.
        value: writes a value.
        depth: maximum depth of open values.
        keys: allowed names, or None for all.
        names: names that other members must not have.
        more: whether more members are required than the schema names; only then, or without
            anything else, are names without a pattern written.
    """
    every = [(schema, pattern) for schema in case for pattern in name_patterns(schema)]
    if len(every) > MAX_NAME_PATTERNS:
        refuse_keyword(
            "patternProperties", case[0].at, "patternProperties with more than 4 patterns"
        )
    if not (every or more) and names:
        return None
    free = piece_dfa(string_piece(())) if keys is None else keys
    free = subtract_dfa(free, Dfa.from_texts(map(quoted_name, names))) if names else free
    parts = []
    for chosen in product((True, False), repeat=len(every)):
        if every and not any(chosen):
            continue
        own, matched = free, [pair for pair, has in zip(every, chosen, strict=True) if has]
        for (schema, pattern), has in zip(every, chosen, strict=True):
            like = matching_names_dfa(pattern, schema.at, loose=not has)
            own = intersect_dfas(own, like) if has else subtract_dfa(own, like)
        if len(own.table):
            part = value([*other_schemas(case, matched)], depth)
            parts.append(SequencePiece((DfaPiece(own), COLON, part)))
    found = ChoicePiece(parts)
    return found if found.min_width < inf else None


def other_schemas(
    case: SchemaCase, matched: Sequence[tuple[SubSchema, str]]
) -> Iterator[SubSchema]:
    """Yield the schemas of a property without a given name, by the patterns that it matches."""
    for schema in case:
        own = [pattern for one, pattern in matched if one is schema]
        for pattern in own:
            yield schema.descend("patternProperties", pattern)
        if not any(own) and "additionalProperties" in schema.value:
            yield schema.descend("additionalProperties")
