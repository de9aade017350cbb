"""States that an automaton can be in at each place of a text with holes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.constraint.automaton import HOLE, Automaton
from outpace.constraint.dfa import Flags, Ids

MEMORY = 64 * 2**20
"""Maximum bytes of cached sets and moves per automaton."""


class Moves:
    """Transitions from one set of states to another, by any token or one class.

    Attributes:
        bundles: bundle of classes of each move, `[n]`; empty if a class is given.
        tos: index of each target among all target states, `[n]`.
        begins, ends: range of the moves of each source state, `[s]`.
        owners: index of the source state of each move, `[n]`.
        is_deterministic: whether each source state has one move.
        single: the only source state, or -1.
        count: number of target states.
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
        """Classes of all their tokens, possibly repeated."""
        return self.automaton.members[self.automaton.inside.of(np.unique(self.bundles))[1]]

    @property
    def banned(self) -> Tensor:
        """Tokens that no move takes, `bool[V]`."""
        if self.mask is None:
            allowed = np.zeros(self.automaton.table.shape[1], dtype=bool)
            allowed[self.kinds] = True
            self.mask = torch.from_numpy(~allowed[self.automaton.classes])
        return self.mask

    @property
    def only(self) -> int | None:
        """The only possible token, or None."""
        if len(self.tos) != 1 or len(self.kinds) != 1:
            return None
        same, kind = self.automaton.same, self.kinds[0]
        return int(self.automaton.order[same.firsts[kind]]) if same.counts[kind] == 1 else None


@dataclass(slots=True, eq=False)
class States:
    """A set of states, with its cached successors and predecessors by class."""

    flags: Flags
    after: dict[int, States] = field(default_factory=dict)
    before: dict[int, States] = field(default_factory=dict)
    moves: dict[tuple[States, int], Moves] = field(default_factory=dict)


class Sets:
    """Distinct sets of states of an automaton, dropped together when they take too much memory."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.far = automaton.far
        self.forget()

    def forget(self) -> None:
        """Drop all sets; those in use remain valid."""
        self.known: dict[bytes, States] = {}
        self.singles: dict[int, States] = {}
        self.near: dict[int, States] = {}
        self.used = 0

    def of(self, flags: Flags) -> States:
        """Return the set of states `flags [S]`."""
        key = flags.tobytes()
        if key not in self.known:
            self.charge(len(flags))
            self.known[key] = States(flags)
        return self.known[key]

    def charge(self, size: int) -> None:
        """Count bytes that are cached from now on."""
        if self.used > MEMORY:
            self.forget()
        self.used += size

    def single(self, state: int) -> States:
        """Return the set of one state."""
        if state not in self.singles:
            self.singles[state] = self.of(np.arange(len(self.automaton.left)) == state)
        return self.singles[state]

    def within(self, left: int) -> States:
        """Return the states from which an answer can be finished with `left` tokens."""
        left = min(left, self.far)
        if left not in self.near:
            self.near[left] = self.of(self.automaton.finishes(left))
        return self.near[left]

    def after(self, states: States, kind: int) -> States:
        """Return the states that a class, or any with `HOLE_CLASS`, leads to."""
        if kind not in states.after:
            states.after[kind] = self.of(self.automaton.follows(states.flags, kind))
        return states.after[kind]

    def before(self, states: States, kind: int) -> States:
        """Return the states from which a class, or any with `HOLE_CLASS`, leads to these."""
        if kind not in states.before:
            states.before[kind] = self.of(self.automaton.precedes(states.flags, kind))
        return states.before[kind]

    def moves(self, heads: States, tails: States, kind: int = HOLE) -> Moves:
        """Return the moves between two sets by a class, or any with `HOLE_CLASS`."""
        key = tails, kind
        if key not in heads.moves:
            found = heads.moves[key] = Moves(self.automaton, heads.flags, tails.flags, kind)
            self.charge(32 * len(found.tos) + len(self.automaton.classes))
        return heads.moves[key]


class Reach:
    """Possible states before each place of an answer.

    Args:
        sets: cached sets of the automaton.
        states: states before the places up to `first`: the first hole, or the first token that
            is part of no answer.
        kinds: classes from there on, or `HOLE_CLASS`; all later places are holes.
        room: number of places.
        both: whether tokens after a hole constrain it.
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
        self.tails: list[States] = []  # of the last places, in descending order
        filled = [place for place, kind in enumerate(kinds, self.first) if kind != HOLE]
        self.bound = filled[-1] + 1 if both and filled else 0  # first place after the last token

    def kind(self, place: int) -> int:
        """Return the class of the token at a place, or `HOLE_CLASS`."""
        offset = place - self.first
        return self.kinds[offset] if 0 <= offset < len(self.kinds) else HOLE

    def head(self, place: int) -> States:
        """Return the states that the tokens before a place can lead to."""
        if place < self.first:
            return self.sets.single(self.states[place])
        while len(self.heads) <= place - self.first:
            kind = self.kind(self.first + len(self.heads) - 1)
            self.heads.append(self.sets.after(self.heads[-1], kind))
        return self.heads[place - self.first]

    def tail(self, place: int) -> States:
        """Return the states from which the tokens from a place on can be finished."""
        if place >= self.bound or place <= self.first:
            return self.sets.within(self.room - place)
        while len(self.tails) < self.bound - place:
            at = self.bound - len(self.tails) - 1
            following = self.tails[-1] if self.tails else self.tail(self.bound)
            self.tails.append(self.sets.before(following, self.kind(at)))
        return self.tails[self.bound - place - 1]

    def banned(self, place: int) -> Tensor:
        """Return the tokens that no answer has at a place, `bool[V]`."""
        return self.sets.moves(self.head(place), self.tail(place + 1)).banned

    def steps(self, end: int) -> list[Moves]:
        """Return the moves from place to place, from the first hole to `end`."""
        tails = [self.tail(end)]
        for place in range(end - 1, self.first, -1):
            tails.append(self.sets.before(tails[-1], self.kind(place)))
        return [
            self.sets.moves(self.head(place), tail, self.kind(place))
            for place, tail in enumerate(reversed(tails), self.first)
        ]
