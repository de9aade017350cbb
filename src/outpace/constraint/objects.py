"""Objects of JSON schemas, as pieces of a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from math import inf
from typing import Any

from outpace.constraint.algebra import accepted, difference, intersection
from outpace.constraint.dfa import Dfa
from outpace.constraint.keywords import need, refuse
from outpace.constraint.members import Member, Members
from outpace.constraint.pieces import IS, NOTHING, Chain, Either, Leaf, Piece, Text, dfa_of
from outpace.constraint.rules import Case, Schema, counts, required
from outpace.constraint.strings import found_in, quoted, string

MOST_PATTERNS = 4
"""Maximum patterns of names; each combination of matches is a separate case."""

Value = Callable[[Sequence[Schema], int], Piece]
"""Writes a value for which some schemas hold, with this maximum depth where they leave it open."""


def object_of(case: Case, value: Value, depth: int) -> Piece:
    """Return the piece of an object: its named properties in order, then others.

    Other properties are written only if the schema has patterns for them, has no named properties,
    or requires more than it names.
    """
    least, most = counts(case, "Properties")
    needs, must = dependent(case), required(case)
    names = dict.fromkeys(chain(*map(named, case), must, needs, *needs.values()))
    keys = allowed(case, value)
    members = []
    for name in names:
        fits = keys is None or accepted(keys, written(name).encode())
        part = value(holding(case, name), depth) if fits else NOTHING
        if part.width < inf or name in must:
            members.append(Member(name, Chain((Text(written(name)), IS, part)), name in must))
    others = rest(case, value, depth, keys, list(names), least > len(members))
    if others is not None and least > len(members) + 1:
        refuse("minProperties", case[0].at, "minProperties that takes two names without properties")
    if least <= len(must):
        least = 0
    if others is None and most is not None and most >= len(members):
        most = None
    return Members(members=members, others=others, least=least, most=most, needs=needs)


def named(schema: Schema) -> dict[str, Any]:
    """Return the properties that a schema names."""
    found: dict[str, Any] = need(
        schema.value.get("properties", {}), dict, f"properties at {schema.at}"
    )
    return found


def written(name: str) -> str:
    """Return a name as JSON writes it."""
    return json.dumps(name, ensure_ascii=False)


def dependent(case: Case) -> dict[str, frozenset[str]]:
    """Return the names that each name requires."""
    found: dict[str, frozenset[str]] = {}
    for schema in case:
        at = f"dependentRequired at {schema.at}"
        for name, others in need(schema.value.get("dependentRequired", {}), dict, at).items():
            own = (need(other, str, at) for other in need(others, list, at))
            found[name] = found.get(name, frozenset()).union(own)
    return found


def allowed(case: Case, value: Value) -> Dfa | None:
    """Return the automaton of quoted names that `propertyNames` allows, or None without it."""
    parts = [schema.part("propertyNames") for schema in case if "propertyNames" in schema.value]
    if not parts:
        return None
    return dfa_of(value([Schema({"type": "string"}, parts[0].at), *parts], 0))


def patterns(schema: Schema) -> list[str]:
    """Return the patterns of names in a schema."""
    found = need(
        schema.value.get("patternProperties", {}), dict, f"patternProperties at {schema.at}"
    )
    return list(found)


def names_like(pattern: str, at: str, *, loose: bool) -> Dfa:
    """Return the automaton of quoted names that match a pattern, or if `loose` may match."""
    return dfa_of(quoted(Leaf(found_in(pattern, f"{at}/patternProperties", loose))))


def holding(case: Case, name: str) -> list[Schema]:
    """Return the schemas of a property by name and by each pattern that may match."""
    found, text = [], written(name).encode()
    for schema in case:
        is_named = name in named(schema)
        if is_named:
            found.append(schema.part("properties", name))
        for pattern in patterns(schema):
            if accepted(names_like(pattern, schema.at, loose=True), text):
                found.append(schema.part("patternProperties", pattern))
            # The validator jsonschema ignores an empty pattern.
            is_named = is_named or (
                pattern != "" and accepted(names_like(pattern, schema.at, loose=False), text)
            )
        if not is_named and "additionalProperties" in schema.value:
            found.append(schema.part("additionalProperties"))
    return found


def rest(
    case: Case, value: Value, depth: int, keys: Dfa | None, names: Sequence[str], more: bool
) -> Piece | None:
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
    every = [(schema, pattern) for schema in case for pattern in patterns(schema)]
    if len(every) > MOST_PATTERNS:
        refuse("patternProperties", case[0].at, "patternProperties with more than 4 patterns")
    if not (every or more) and names:
        return None
    free = dfa_of(string(())) if keys is None else keys
    free = difference(free, Dfa.among(map(written, names))) if names else free
    parts = []
    for chosen in product((True, False), repeat=len(every)):
        if every and not any(chosen):
            continue
        own, matched = free, [pair for pair, has in zip(every, chosen, strict=True) if has]
        for (schema, pattern), has in zip(every, chosen, strict=True):
            like = names_like(pattern, schema.at, loose=not has)
            own = intersection(own, like) if has else difference(own, like)
        if len(own.table):
            part = value([*others(case, matched)], depth)
            parts.append(Chain((Leaf(own), IS, part)))
    found = Either(parts)
    return found if found.width < inf else None


def others(case: Case, matched: Sequence[tuple[Schema, str]]) -> Iterator[Schema]:
    """Yield the schemas of a property without a given name, by the patterns that it matches."""
    for schema in case:
        own = [pattern for one, pattern in matched if one is schema]
        for pattern in own:
            yield schema.part("patternProperties", pattern)
        if not any(own) and "additionalProperties" in schema.value:
            yield schema.part("additionalProperties")
