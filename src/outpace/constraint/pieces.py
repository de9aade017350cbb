"""Pieces from which the NFA of a JSON value is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple, Protocol

from outpace.constraint.dfa import (
    Dfa,
    StateEdges,
    StepBudget,
    determinize_nfa,
    dfa_edges,
    embed_dfa,
    shortest_length,
)
from outpace.constraint.pattern import Nfa


class JsonPiece(Protocol):
    """A part of a string."""

    @property
    def min_width(self) -> float:
        """Lower bound on its characters; infinite if there is no such text."""

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        """Add it to an NFA after state `at`; return the state that it leads to."""


@dataclass(frozen=True)
class LiteralPiece:
    """A given text."""

    text: str

    @property
    def min_width(self) -> float:
        return len(self.text)

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        for byte in self.text.encode():
            after = net.add_state()
            net.edges[at].append(((byte, byte), after))
            at = after
        return at


@dataclass(frozen=True, eq=False)
class DfaPiece:
    """A string that an automaton accepts."""

    dfa: Dfa

    @cached_property
    def min_width(self) -> float:
        """Bytes of the shortest text; equal to its characters if these are ASCII."""
        return shortest_length(self.dfa)

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        return embed_dfa(self.edges, self.dfa.accepts.tolist(), net, at)

    @cached_property
    def edges(self) -> StateEdges:
        return dfa_edges(self.dfa)


@dataclass(frozen=True)
class SequencePiece:
    """Consecutive pieces."""

    parts: Sequence[JsonPiece]

    @cached_property
    def min_width(self) -> float:
        return sum(part.min_width for part in self.parts)

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        for part in self.parts:
            at = part.add_to_nfa(net, at)
        return at


@dataclass(frozen=True)
class ChoicePiece:
    """One of several pieces; without pieces, no text at all."""

    parts: Sequence[JsonPiece] = ()

    @cached_property
    def min_width(self) -> float:
        return min((part.min_width for part in self.parts), default=inf)

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        end = net.add_state()
        for part in self.parts:
            net.epsilon_edges[at].append(begin := net.add_state())
            net.epsilon_edges[part.add_to_nfa(net, begin)].append(end)
        return end


@dataclass(frozen=True)
class RepeatPiece:
    """A nonempty piece repeated `least` to `most` times; None is unbounded."""

    part: JsonPiece
    least: int
    most: int | None

    @cached_property
    def min_width(self) -> float:
        """Width of `least` repeats; infinite if `most` is less."""
        if self.most is not None and self.most < self.least:
            return inf
        return self.least * self.part.min_width if self.least else 0

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        end = net.add_state()
        if self.most is not None and self.most < self.least:
            return end
        for _ in range(self.least):
            at = self.part.add_to_nfa(net, at)
        if self.most is None:
            net.epsilon_edges[at].append(loop := net.add_state())
            net.epsilon_edges[self.part.add_to_nfa(net, loop)].append(loop)
            at = loop
        else:
            for _ in range(self.most - self.least if self.part.min_width < inf else 0):
                net.epsilon_edges[at].append(end)
                at = self.part.add_to_nfa(net, at)
        net.epsilon_edges[at].append(end)
        return end


NO_TEXT = ChoicePiece()

COMMA, COLON = (
    SequencePiece((LiteralPiece(sign), RepeatPiece(LiteralPiece(" "), 0, 1))) for sign in ",:"
)
"""A comma and a colon, each optionally followed by a space; there is no other whitespace."""


class ObjectMember(NamedTuple):
    """A property of an object: the piece of its name and value."""

    part: JsonPiece
    required: bool


@dataclass(frozen=True)
class ObjectPiece:
    """An object: members in order, then any number of `others`."""

    members: Sequence[ObjectMember]
    others: JsonPiece | None = None

    @cached_property
    def min_width(self) -> float:
        return 2 + sum(member.part.min_width for member in self.members if member.required)

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        """Add three states per place: before the first member, after a comma, after a member."""
        # Members are skipped from place to place, so that each member has two successors instead of
        # one per later member.
        count, end = len(self.members), net.add_state()
        begin = LiteralPiece("{").add_to_nfa(net, at)
        first, further, done = ([net.add_state() for _ in range(count + 1)] for _ in range(3))
        net.epsilon_edges[begin].append(first[0])
        for place, member in enumerate(self.members):
            start = net.add_state()
            for choices in (first, further):
                net.epsilon_edges[choices[place]].append(start)
                if not member.required:
                    net.epsilon_edges[choices[place]].append(choices[place + 1])
            net.epsilon_edges[member.part.add_to_nfa(net, start)].append(done[place + 1])
        if self.others is not None:
            start = net.add_state()
            for choices in (first, further):
                net.epsilon_edges[choices[count]].append(start)
            net.epsilon_edges[self.others.add_to_nfa(net, start)].append(done[count])
        required = [place for place, member in enumerate(self.members, 1) if member.required]
        for place, state in enumerate(done):
            net.epsilon_edges[COMMA.add_to_nfa(net, state)].append(further[place])
            if place >= max(required, default=0):
                net.epsilon_edges[LiteralPiece("}").add_to_nfa(net, state)].append(end)
        if not required:
            net.epsilon_edges[LiteralPiece("}").add_to_nfa(net, begin)].append(end)
        return end


def piece_dfa(piece: JsonPiece, budget: StepBudget | None = None) -> Dfa:
    """Return the automaton of one piece; it has no states if there is no such text.

    Args:
        piece: The piece.
        budget: Work that is left, see `determinize_nfa`.
    """
    net = Nfa()
    net.end = piece.add_to_nfa(net, 0)
    return determinize_nfa(net, budget)


def join_with_commas(items: Sequence[JsonPiece]) -> JsonPiece:
    return SequencePiece([part for item in items for part in (COMMA, item)][1:])


def repeat_with_commas(item: JsonPiece, least: int, most: int | None) -> JsonPiece:
    """Return an item repeated `least` to `most` times, separated by commas."""
    if most == 0 or (most is not None and most < least):
        return NO_TEXT if least else SequencePiece(())
    more = RepeatPiece(
        SequencePiece((COMMA, item)), max(least - 1, 0), None if most is None else most - 1
    )
    return SequencePiece((item, more)) if least else RepeatPiece(SequencePiece((item, more)), 0, 1)
