"""Objects of JSON schemas, as pieces of a string."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from math import inf
from typing import Any, NamedTuple

from outpace.constraint.dfa import Dfa, dfa_accepts, intersect_dfas, subtract_dfa
from outpace.constraint.keywords import (
    SchemaCase,
    SubSchema,
    count_bounds,
    refuse_keyword,
    require_type,
    required_names,
)
from outpace.constraint.pattern import Nfa
from outpace.constraint.pieces import (
    COLON,
    COMMA,
    NO_TEXT,
    ChoicePiece,
    DfaPiece,
    JsonPiece,
    LiteralPiece,
    SequencePiece,
    piece_dfa,
)
from outpace.constraint.strings import quote_piece, search_pattern_dfa, string_piece


class ObjectMember(NamedTuple):
    """A property of an object: its name, and the piece for both name and value."""

    name: str
    part: JsonPiece
    required: bool


class ObjectProgress(NamedTuple):
    """State of a partially written object.

    Attributes:
        place: number of named members that were written or skipped.
        written: members written, up to the count that matters.
        sure: distinct names among them, up to the count that matters.
        names: written names that others depend on.
        other: whether a member without a given name was written.
    """

    place: int = 0
    written: int = 0
    sure: int = 0
    names: frozenset[str] = frozenset()
    other: bool = False


@dataclass(frozen=True, kw_only=True)
class ObjectPiece:
    """An object: named members in order, then any number of `others`.

    Attributes:
        members: named members.
        others: piece of other members.
        least: minimum number of members. Two of the others may have the same name, so all of
            them together count as one here, and each of them for `most`.
        most: maximum number of members.
        needs: names that each name requires.
    """

    members: Sequence[ObjectMember]
    others: JsonPiece | None = None
    least: int = 0
    most: int | None = None
    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def min_width(self) -> float:
        """Width of the braces and required members."""
        return 2 + sum(member.part.min_width for member in self.members if member.required)

    @cached_property
    def dependent_names(self) -> frozenset[str]:
        """Names that others require, or that require others."""
        return frozenset(self.needs).union(*self.needs.values())

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        """Add three states per progress: before a separator, before a choice, and at a member.

        Members are skipped after a comma, so that each member has two successors instead of one per
        later member.
        """
        end, states = net.add_state(), {ObjectProgress(): LiteralPiece("{").add_to_nfa(net, at)}
        choices, begins = dict[ObjectProgress, int](), dict[ObjectProgress, int]()
        progresses, waiting = [*states], list[ObjectProgress]()
        for now in progresses:
            if self.can_end(now):
                net.epsilon_edges[LiteralPiece("}").add_to_nfa(net, states[now])].append(end)
            pick = COMMA.add_to_nfa(net, states[now]) if now.written else states[now]
            net.epsilon_edges[pick].append(progress_state(now, choices, waiting, net))
            while waiting:
                place = waiting.pop()
                for after, part in self.next_members(place):
                    if part is None:
                        target = progress_state(after, choices, waiting, net)
                    else:
                        if after not in begins:
                            begins[after] = net.add_state()
                            done = part.add_to_nfa(net, begins[after])
                            net.epsilon_edges[done].append(
                                progress_state(after, states, progresses, net)
                            )
                        target = begins[after]
                    net.epsilon_edges[choices[place]].append(target)
        return end

    def next_members(
        self, now: ObjectProgress
    ) -> Iterator[tuple[ObjectProgress, JsonPiece | None]]:
        if now.place < len(self.members):
            name, part, required = self.members[now.place]
            now = now._replace(place=now.place + 1)
            if not required:
                yield now, None
            if now.written != self.most:
                names = now.names | ({name} & self.dependent_names)
                yield self.count_member(now._replace(names=names), 1), part
        elif self.others is not None and now.written != self.most:
            yield self.count_member(now._replace(other=True), not now.other), self.others

    def count_member(self, now: ObjectProgress, sure: int) -> ObjectProgress:
        written = now.written + 1 if self.most is not None else 1
        return now._replace(written=written, sure=min(now.sure + sure, self.least))

    def can_end(self, now: ObjectProgress) -> bool:
        return (
            not any(member.required for member in self.members[now.place :])
            and now.sure >= self.least
            and all(self.needs.get(name, now.names) <= now.names for name in now.names)
        )


def progress_state(
    progress: ObjectProgress,
    states: dict[ObjectProgress, int],
    queue: list[ObjectProgress],
    net: Nfa,
) -> int:
    """Return the state of a progress, and queue it if it is new."""
    if progress not in states:
        states[progress] = net.add_state()
        queue.append(progress)
    return states[progress]


@dataclass(frozen=True)
class DistinctArrayPiece:
    """An array of `least` to `most` of some values, each at most once."""

    values: Sequence[JsonPiece]
    least: int
    most: int | None

    @cached_property
    def min_width(self) -> float:
        """Width of the brackets and of the minimum number of values."""
        widths = sorted(value.min_width for value in self.values)
        return 2 + sum(widths[: self.least])

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        """Add a state for each set of written values."""
        end, states = net.add_state(), {frozenset[int](): LiteralPiece("[").add_to_nfa(net, at)}
        waiting = [*states]
        for used in waiting:
            for number in range(len(self.values) if len(used) != self.most else 0):
                if (after := used | {number}) == used:
                    continue
                if after not in states:
                    states[after] = net.add_state()
                    waiting.append(after)
                begin = COMMA.add_to_nfa(net, states[used]) if used else states[used]
                net.epsilon_edges[self.values[number].add_to_nfa(net, begin)].append(states[after])
            if len(used) >= self.least:
                net.epsilon_edges[LiteralPiece("]").add_to_nfa(net, states[used])].append(end)
        return end


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
    found: dict[str, Any] = require_type(
        schema.value.get("properties", {}), dict, f"properties at {schema.at}"
    )
    return found


def quoted_name(name: str) -> str:
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
    for schema in case:
        own = [pattern for one, pattern in matched if one is schema]
        for pattern in own:
            yield schema.descend("patternProperties", pattern)
        if not any(own) and "additionalProperties" in schema.value:
            yield schema.descend("additionalProperties")
