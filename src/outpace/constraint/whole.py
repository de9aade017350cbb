"""Automata of holes, which are filled to the last place."""

from __future__ import annotations

import numpy as np

from outpace.constraint.automaton import HOLE, NEVER, Automaton
from outpace.constraint.dfa import Dfa, Flags
from outpace.constraint.pattern import TooLarge
from outpace.constraint.vocabulary import Vocabulary

MOST_STEPS = 50_000_000
"""Pairs of states that are looked at for all places of a hole, and some for each place: a second
or less."""


class Whole(Automaton):
    """An automaton whose texts take all places that there are; there is no end-of-sequence."""

    padded = False

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        super().__init__(dfa, vocabulary, ends)
        self.rooms: list[Flags] = [self.accepts]

    def pad(self) -> None:
        """Let end-of-sequence alone follow whole texts, or nothing."""
        self.accepts[self.end] = self.padded
        self.table[self.accepts, -1] = self.end if self.padded else -1

    @property
    def far(self) -> int:
        """Every place makes a difference."""
        return NEVER

    def finishes(self, room: int) -> Flags:
        """From which states `[S]` exactly so many places can be filled.

        Raises `TooLarge` where that is too much to look at.
        """
        if room < 0:
            return np.zeros_like(self.accepts)
        if room >= len(self.rooms):
            if room * (self.pairs.shape[1] + 500) > MOST_STEPS:
                raise TooLarge(f"it is too large for {room} tokens: shorten one of them")
            rooms = list(self.rooms)  # a copy, as other threads may do the same
            while len(rooms) <= room:
                rooms.append(self.precedes(rooms[-1], HOLE))
            self.rooms = rooms
        return self.rooms[room]


class Padded(Whole):
    """The same, where end-of-sequence takes the places that a text leaves over."""

    padded = True
