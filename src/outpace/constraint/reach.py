"""What an automaton can still do with a text that has holes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.constraint.automaton import Automaton
from outpace.constraint.dfa import Flags

HOLE = -1


class Reach:
    """States that can stand in front of each place of an answer.

    `kinds` are the classes of its tokens from place 0 on, or `HOLE`; behind them are holes up to
    `room`, the places that there are. `state` is where the tokens in front of place `first` lead,
    which is the first hole. `both` says whether tokens behind a hole bind it.
    """

    def __init__(
        self,
        automaton: Automaton,
        kinds: Sequence[int],
        *,
        first: int,
        state: int,
        room: int,
        both: bool,
    ) -> None:
        self.automaton = automaton
        self.kinds = kinds[:room]
        self.first = first
        self.room = room
        begin = np.zeros(len(automaton.accepts), dtype=bool)
        begin[state] = True
        self.heads = [begin]
        self.tails: list[Flags] = []  # of the last places, in falling order
        known = [place for place, kind in enumerate(self.kinds) if kind != HOLE]
        self.bound = known[-1] + 1 if both and known else 0  # first place behind the last token

    def kind(self, place: int) -> int:
        """The class of the token at a place, or `HOLE`."""
        return self.kinds[place] if place < len(self.kinds) else HOLE

    def head(self, place: int) -> Flags:
        """States `[S]` to which what is known in front of a place may lead."""
        while len(self.heads) <= place - self.first:
            states, kind = self.heads[-1], self.kind(self.first + len(self.heads) - 1)
            if kind == HOLE:
                self.heads.append(self.automaton.follows(states))
                continue
            reached = np.zeros_like(states)
            targets = self.automaton.table[states, kind]
            reached[targets[targets >= 0]] = True
            self.heads.append(reached)
        return self.heads[place - self.first]

    def tail(self, place: int) -> Flags:
        """States `[S]` from which an answer can be finished, given what is known from there on."""
        if place >= self.bound:
            return self.automaton.finishes(self.room - place)
        while len(self.tails) < self.bound - place:
            at = self.bound - len(self.tails) - 1
            states = self.tails[-1] if self.tails else self.tail(self.bound)
            if self.kind(at) == HOLE:
                self.tails.append(self.automaton.precedes(states))
            else:
                targets = self.automaton.table[:, self.kind(at)]
                self.tails.append((targets >= 0) & states[targets])
        return self.tails[self.bound - place - 1]

    def allowed(self, place: int) -> Flags:
        """Classes `[C]` of tokens that a hole may take."""
        automaton, found = self.automaton, np.zeros(self.automaton.table.shape[1], dtype=bool)
        live = self.head(place)[automaton.froms] & self.tail(place + 1)[automaton.tos]
        found[automaton.kinds[live]] = True
        return found
