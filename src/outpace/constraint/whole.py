"""Automata of holes, which are filled to the last place."""

from __future__ import annotations

import numpy as np

from outpace.constraint.automaton import HOLE, NEVER, Automaton
from outpace.constraint.dfa import Dfa, Flags
from outpace.constraint.pattern import TooLarge
from outpace.constraint.vocabulary import Vocabulary

MOST_STEPS = 50_000_000
"""Maximum pairs of states visited for all places of a hole, plus a cost per place; takes at most
about a second."""


class Whole(Automaton):
    """An automaton whose texts fill all places, without an end-of-sequence."""

    padded = False

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        super().__init__(dfa, vocabulary, ends)
        self.rooms: list[Flags] = [self.accepts]

    def pad(self) -> None:
        """Let only end-of-sequence, or nothing, follow whole texts."""
        self.accepts[self.end] = self.padded
        self.table[self.accepts, -1] = self.end if self.padded else -1

    @property
    def far(self) -> int:
        """No bound: each number of places differs."""
        return NEVER

    def finishes(self, room: int) -> Flags:
        """Return the states `[S]` from which exactly `room` places can be filled.

        Raises:
            TooLargeError: if this takes too long.
        """
        if room < 0:
            return np.zeros_like(self.accepts)
        if room >= len(self.rooms):
            if room * (self.pairs.shape[1] + 500) > MOST_STEPS:
                raise TooLarge(f"it is too large for {room} tokens: shorten one of them")
            rooms = list(self.rooms)  # a copy, because other threads may extend it too
            while len(rooms) <= room:
                rooms.append(self.precedes(rooms[-1], HOLE))
            self.rooms = rooms
        return self.rooms[room]


class Padded(Whole):
    """A hole automaton in which end-of-sequence fills the remaining places."""

    padded = True
