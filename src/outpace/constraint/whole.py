"""Automata of holes, which are filled to the last place."""

from __future__ import annotations

import numpy as np

from outpace.constraint.automaton import HOLE_CLASS, UNREACHABLE, TokenAutomaton
from outpace.constraint.dfa import Dfa, StateFlags
from outpace.constraint.pattern import TooLargeError
from outpace.constraint.vocabulary import Vocabulary

MAX_HOLE_STEPS = 50_000_000
"""Maximum pairs of states visited for all places of a hole, plus a cost per place; takes at most
about a second."""


class HoleAutomaton(TokenAutomaton):
    """An automaton whose strings fill all places, without an end-of-sequence."""

    is_padded = False

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        super().__init__(dfa, vocabulary, ends)
        self.rooms: list[StateFlags] = [self.accepts]

    def add_padding(self) -> None:
        """Let only end-of-sequence, or nothing, follow whole strings."""
        self.accepts[self.end] = self.is_padded
        self.table[self.accepts, -1] = self.end if self.is_padded else -1

    @property
    def max_distance(self) -> int:
        """No bound: each number of places differs."""
        return UNREACHABLE

    def can_finish(self, room: int, thoughts: int | None = None) -> StateFlags:
        """Return the states `[S]` from which exactly `room` places can be filled; no thoughts.

        Raises:
            TooLargeError: if this takes too long.
        """
        if room < 0:
            return np.zeros_like(self.accepts)
        if room >= len(self.rooms):
            if room * (self.pairs.shape[1] + 500) > MAX_HOLE_STEPS:
                raise TooLargeError(f"it is too large for {room} tokens: shorten one of them")
            rooms = list(self.rooms)  # a copy, because other threads may extend it too
            while len(rooms) <= room:
                rooms.append(self.predecessors(rooms[-1], HOLE_CLASS))
            self.rooms = rooms
        return self.rooms[room]


class PaddedHoleAutomaton(HoleAutomaton):
    """A hole automaton in which end-of-sequence fills the remaining places."""

    is_padded = True
