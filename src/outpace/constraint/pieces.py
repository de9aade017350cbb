"""Pieces from which the NFA of a JSON value is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Protocol

from outpace.constraint.algebra import Edges, edges_of, embed, shortest
from outpace.constraint.dfa import Dfa, determined
from outpace.constraint.pattern import Net


class Piece(Protocol):
    """A part of a text."""

    @property
    def width(self) -> float:
        """Lower bound on its characters; infinite if there is no such text."""

    def weave(self, net: Net, at: int) -> int:
        """Add it to an NFA after state `at`; return the state that it leads to."""


@dataclass(frozen=True)
class Text:
    """A given text."""

    text: str

    @property
    def width(self) -> float:
        """Number of characters."""
        return len(self.text)

    def weave(self, net: Net, at: int) -> int:
        """Add a state for each byte."""
        for byte in self.text.encode():
            after = net.state()
            net.edges[at].append(((byte, byte), after))
            at = after
        return at


@dataclass(frozen=True, eq=False)
class Leaf:
    """A text that an automaton accepts."""

    dfa: Dfa

    @cached_property
    def width(self) -> float:
        """Bytes of the shortest text; equal to its characters if these are ASCII."""
        return shortest(self.dfa)

    def weave(self, net: Net, at: int) -> int:
        """Add the states of the automaton."""
        return embed(self.edges, self.dfa.accepts.tolist(), net, at)

    @cached_property
    def edges(self) -> Edges:
        """Edges of its states."""
        return edges_of(self.dfa)


@dataclass(frozen=True)
class Chain:
    """Consecutive pieces."""

    parts: Sequence[Piece]

    @cached_property
    def width(self) -> float:
        """Sum over the pieces."""
        return sum(part.width for part in self.parts)

    def weave(self, net: Net, at: int) -> int:
        """Add each piece after the previous one."""
        for part in self.parts:
            at = part.weave(net, at)
        return at


@dataclass(frozen=True)
class Either:
    """One of several pieces; without pieces, no text at all."""

    parts: Sequence[Piece] = ()

    @cached_property
    def width(self) -> float:
        """Minimum over the pieces."""
        return min((part.width for part in self.parts), default=inf)

    def weave(self, net: Net, at: int) -> int:
        """Add all pieces between two states."""
        end = net.state()
        for part in self.parts:
            net.free[at].append(begin := net.state())
            net.free[part.weave(net, begin)].append(end)
        return end


@dataclass(frozen=True)
class Times:
    """A nonempty piece repeated `least` to `most` times; None is unbounded."""

    part: Piece
    least: int
    most: int | None

    @cached_property
    def width(self) -> float:
        """Width of `least` repeats; infinite if `most` is less."""
        if self.most is not None and self.most < self.least:
            return inf
        return self.least * self.part.width if self.least else 0

    def weave(self, net: Net, at: int) -> int:
        """Add a copy of the piece for each counted repeat."""
        end = net.state()
        if self.most is not None and self.most < self.least:
            return end
        for _ in range(self.least):
            at = self.part.weave(net, at)
        if self.most is None:
            net.free[at].append(loop := net.state())
            net.free[self.part.weave(net, loop)].append(loop)
            at = loop
        else:
            for _ in range(self.most - self.least if self.part.width < inf else 0):
                net.free[at].append(end)
                at = self.part.weave(net, at)
        net.free[at].append(end)
        return end


NOTHING = Either()

NEXT, IS = (Chain((Text(sign), Times(Text(" "), 0, 1))) for sign in ",:")
"""A comma and a colon, each optionally followed by a space; there is no other white space."""


def dfa_of(piece: Piece) -> Dfa:
    """Return the automaton of one piece; it has no states if there is no such text.

    Raises:
        TooLargeError: if it is too large.
    """
    net = Net()
    net.end = piece.weave(net, 0)
    return determined(net)


def separated(items: Sequence[Piece]) -> Piece:
    """Return items separated by commas."""
    return Chain([part for item in items for part in (NEXT, item)][1:])


def several(item: Piece, least: int, most: int | None) -> Piece:
    """Return an item repeated `least` to `most` times, separated by commas."""
    if most == 0 or (most is not None and most < least):
        return NOTHING if least else Chain(())
    more = Times(Chain((NEXT, item)), max(least - 1, 0), None if most is None else most - 1)
    return Chain((item, more)) if least else Times(Chain((item, more)), 0, 1)
