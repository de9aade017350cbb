"""What an automaton can still do with a text that has holes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.constraint.automaton import HOLE, Automaton
from outpace.constraint.dfa import Flags, Ids

MEMORY = 64 * 2**20
"""Bytes of sets and moves that are kept for each automaton."""


class Moves:
    """What leads from one set of states to another: any token, or one of a class.

    Attributes:
        bundles: `[n]`, the classes that lead from a state to another; none where one is given.
        tos: `[n]`, where they lead, as a place among all the states that any of them leads to.
        begins, ends: `[s]`, the own ones of each state that has any; all are in order.
        owners: `[n]`, the place of its state among these.
        alone: whether each state has one.
        single: the state, where there is one; else -1.
        count: how many states they lead to.
    """

    def __init__(self, automaton: Automaton, heads: Flags, tails: Flags, kind: int) -> None:
        states = np.flatnonzero(heads)
        which, targets, places = automaton.leading(states, kind)
        live = tails[targets]
        which, targets = which[live], targets[live]
        self.automaton = automaton
        self.bundles = automaton.bundles[places[live]] if kind == HOLE else which[:0]
        self.begins = np.flatnonzero(np.diff(which, prepend=-1))
        self.ends: Ids = np.append(self.begins, len(which))[1:]
        self.owners = np.repeat(np.arange(len(self.begins)), self.ends - self.begins)
        self.alone = len(self.begins) == len(which)
        self.single = int(states[which[0]]) if len(self.begins) == 1 else -1
        found = np.zeros(len(tails), dtype=bool)
        found[targets] = True
        self.tos = (found.cumsum() - 1)[targets]
        self.count = int(found.sum())
        self.mask: Tensor | None = None

    @property
    def kinds(self) -> Ids:
        """The classes of all their tokens, some of them more than once."""
        return self.automaton.members[self.automaton.inside.of(np.unique(self.bundles))[1]]

    @property
    def banned(self) -> Tensor:
        """`bool[V]`, the tokens that none of them takes."""
        if self.mask is None:
            allowed = np.zeros(self.automaton.table.shape[1], dtype=bool)
            allowed[self.kinds] = True
            self.mask = torch.from_numpy(~allowed[self.automaton.classes])
        return self.mask

    @property
    def only(self) -> int | None:
        """The token that alone is left, where that is so."""
        if len(self.tos) != 1 or len(self.kinds) != 1:
            return None
        same, kind = self.automaton.same, self.kinds[0]
        return int(self.automaton.order[same.firsts[kind]]) if same.counts[kind] == 1 else None


@dataclass(slots=True, eq=False)
class States:
    """A set of states, and what was found out about it: by class what follows and precedes it."""

    flags: Flags
    after: dict[int, States] = field(default_factory=dict)
    before: dict[int, States] = field(default_factory=dict)
    moves: dict[tuple[States, int], Moves] = field(default_factory=dict)


class Sets:
    """Sets of states of an automaton, each once; all are forgotten when they take much memory."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.far = automaton.far
        self.forget()

    def forget(self) -> None:
        """Begin anew; what is in use stays as it is."""
        self.known: dict[bytes, States] = {}
        self.singles: dict[int, States] = {}
        self.near: dict[int, States] = {}
        self.used = 0

    def of(self, flags: Flags) -> States:
        """The set of states `flags [S]`."""
        key = flags.tobytes()
        if key not in self.known:
            self.charge(len(flags))
            self.known[key] = States(flags)
        return self.known[key]

    def charge(self, size: int) -> None:
        """Count bytes that are kept from now on."""
        if self.used > MEMORY:
            self.forget()
        self.used += size

    def single(self, state: int) -> States:
        """One state."""
        if state not in self.singles:
            self.singles[state] = self.of(np.arange(len(self.automaton.left)) == state)
        return self.singles[state]

    def within(self, left: int) -> States:
        """States from which an answer can be finished with so many tokens."""
        left = min(left, self.far)
        if left not in self.near:
            self.near[left] = self.of(self.automaton.finishes(left))
        return self.near[left]

    def after(self, states: States, kind: int) -> States:
        """States to which a class leads from these, or for `HOLE` any."""
        if kind not in states.after:
            states.after[kind] = self.of(self.automaton.follows(states.flags, kind))
        return states.after[kind]

    def before(self, states: States, kind: int) -> States:
        """States from which a class leads to these, or for `HOLE` any."""
        if kind not in states.before:
            states.before[kind] = self.of(self.automaton.precedes(states.flags, kind))
        return states.before[kind]

    def moves(self, heads: States, tails: States, kind: int = HOLE) -> Moves:
        """What leads from some states to others by a class, or for `HOLE` by any."""
        key = tails, kind
        if key not in heads.moves:
            found = heads.moves[key] = Moves(self.automaton, heads.flags, tails.flags, kind)
            self.charge(32 * len(found.tos) + len(self.automaton.classes))
        return heads.moves[key]


class Reach:
    """States that can stand in front of each place of an answer.

    `states` are those in front of its places up to `first`, the first hole, or the first token that
    is part of no answer. `kinds` are the classes from there on, or `HOLE`; behind them are holes up
    to `room`, the places that there are. `both` says whether tokens behind a hole bind it.
    """

    def __init__(
        self, sets: Sets, states: Sequence[int], kinds: Sequence[int], *, room: int, both: bool
    ) -> None:
        self.sets = sets
        self.states = states
        self.first = len(states) - 1
        self.kinds = kinds
        self.room = room
        self.heads = [sets.single(states[-1])]
        self.tails: list[States] = []  # of the last places, in falling order
        known = [place for place, kind in enumerate(kinds, self.first) if kind != HOLE]
        self.bound = known[-1] + 1 if both and known else 0  # first place behind the last token

    def kind(self, place: int) -> int:
        """The class of the token at a place, or `HOLE`."""
        behind = place - self.first
        return self.kinds[behind] if 0 <= behind < len(self.kinds) else HOLE

    def head(self, place: int) -> States:
        """States to which what is known in front of a place may lead."""
        if place < self.first:
            return self.sets.single(self.states[place])
        while len(self.heads) <= place - self.first:
            kind = self.kind(self.first + len(self.heads) - 1)
            self.heads.append(self.sets.after(self.heads[-1], kind))
        return self.heads[place - self.first]

    def tail(self, place: int) -> States:
        """States from which an answer can be finished, given what is known from there on."""
        if place >= self.bound or place <= self.first:
            return self.sets.within(self.room - place)
        while len(self.tails) < self.bound - place:
            at = self.bound - len(self.tails) - 1
            behind = self.tails[-1] if self.tails else self.tail(self.bound)
            self.tails.append(self.sets.before(behind, self.kind(at)))
        return self.tails[self.bound - place - 1]

    def banned(self, place: int) -> Tensor:
        """Tokens `bool[V]` that no answer has at a place."""
        return self.sets.moves(self.head(place), self.tail(place + 1)).banned

    def steps(self, end: int) -> list[Moves]:
        """What leads from place to place, from the first hole to `end`, and on to an answer."""
        tails = [self.tail(end)]
        for place in range(end - 1, self.first, -1):
            tails.append(self.sets.before(tails[-1], self.kind(place)))
        return [
            self.sets.moves(self.head(place), tail, self.kind(place))
            for place, tail in enumerate(reversed(tails), self.first)
        ]
