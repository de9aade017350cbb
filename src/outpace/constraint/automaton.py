"""Automata over tokens: which answers there are, and how short they may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.constraint.dfa import Dfa, Flags, Ids, Table
from outpace.constraint.pattern import TooLarge
from outpace.constraint.vocabulary import Spans, Vocabulary
from outpace.decoding.noise import mix

HOLE = -1
"""Stands for the class of a token that is not known."""

NEVER = 2**30
"""Tokens to an end that is never reached."""

MOST_ENTRIES = 20_000_000
"""Size of the table of an automaton."""


class Automaton:
    """A deterministic automaton over the tokens of a vocabulary.

    Texts begin in state 0. In the last state, to which a token of `ends` leads where a text may
    end, everything is padding. Tokens that lead from each state to the same ones share a class: 0
    leads nowhere, the last class is that of `ends`.

    Attributes:
        classes: `[V]`, the class of each token.
        table: `[S, C]`, where a class leads from a state; -1 where no answer goes on so.
        accepts: `[S]`, whether an answer may end there.
        left: `[S]`, fewest tokens to a state where it may.
        order: `[V]`, tokens by class.
        same: where those of a class lie in that order.
        some: the classes that have tokens.
        pairs: `[2, P]`, states of which some token leads from one to the other, in order.
        own: where those lie that lead from a state.
        bundles: `[P]`, which classes lead from the one to the other, by the number of the bundle.
        members: the classes of the bundles, where `inside` says.
    """

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        text, end = np.ones(vocabulary.size, dtype=bool), len(dfa.table)
        text[list(ends)] = False
        found = ((ids[text[ids]], froms, tos) for ids, froms, tos in vocabulary.moves(dfa))
        moves = [move for move in found if len(move[0])]
        self.classes, examples = classified(moves, vocabulary.size, end)
        last = int(self.classes.max()) + 1
        if (end + 1) * (last + 1) > MOST_ENTRIES:
            raise TooLarge(f"it is too large: {end} states and {last} classes of tokens")
        self.classes[list(ends)] = last
        self.accepts = np.r_[dfa.accepts, True]
        numbers = [froms * (end + 1) + tos for _, froms, tos in moves]
        every = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *numbers]))
        self.left = distances(*np.divmod(every, end + 1), self.accepts)
        self.table = np.full((end + 1, last + 1), -1, dtype=np.int32)
        for tokens, froms, tos in moves:
            self.table[froms[:, None], self.classes[tokens[examples[tokens]]]] = tos[:, None]
        self.table[self.left[self.table] == NEVER] = -1
        self.pad()
        self.order = self.classes.argsort(kind="stable")
        self.same = Spans(self.classes[self.order], last + 1)
        self.some = np.flatnonzero(self.same.counts)
        self.pairs, self.bundles, self.members, self.inside = bundled(self.table)
        self.own = Spans(self.pairs[0], end + 1)

    def pad(self) -> None:
        """Let end-of-sequence follow whole texts, and anything follow that."""
        self.table[self.accepts, -1] = self.end
        self.table[self.end] = self.end

    @property
    def end(self) -> int:
        """The state behind an end-of-sequence."""
        return len(self.accepts) - 1

    @property
    def shortest(self) -> int:
        """Tokens of the shortest answer."""
        return int(self.left[0])

    @property
    def far(self) -> int:
        """More places than these to an end make no difference."""
        return int(self.left[self.left < NEVER].max())

    def finishes(self, room: int) -> Flags:
        """From which states `[S]` an answer can be finished in so many places."""
        return self.left <= room

    def walk(self, tokens: Sequence[int], state: int = 0) -> list[int]:
        """The states behind each token; as many as are part of an answer."""
        states = []
        for token in tokens:
            state = int(self.table[state, self.classes[token]])
            if state < 0:
                break
            states.append(state)
        return states

    def leading(self, states: Ids, kind: int) -> tuple[Ids, Ids, Ids]:
        """What a class, or for `HOLE` any, leads to from some states.

        The place of each among `states`, where it leads, and its place among the pairs.
        """
        if kind == HOLE:
            which, places = self.own.of(states)
            return which, self.pairs[1][places], places
        targets = self.table[states, kind].astype(np.int64)
        which = np.flatnonzero(targets >= 0)
        return which, targets[which], which

    def follows(self, states: Flags, kind: int) -> Flags:
        """Which states a class leads to from `states [S]`, or for `HOLE` any."""
        reached = np.zeros_like(states)
        if kind == HOLE:
            reached[self.pairs[1][states[self.pairs[0]]]] = True
        else:
            targets = self.table[states, kind]
            reached[targets[targets >= 0]] = True
        return reached

    def precedes(self, states: Flags, kind: int) -> Flags:
        """From which states a class leads to one of `states [S]`, or for `HOLE` any."""
        if kind != HOLE:
            targets = self.table[:, kind]
            return (targets >= 0) & states[targets]
        reached = np.zeros_like(states)
        reached[self.pairs[0][states[self.pairs[1]]]] = True
        return reached


def classified(
    moves: Sequence[tuple[Ids, Ids, Ids]], size: int, states: int
) -> tuple[Table, Flags]:
    """The class of each of `size` tokens, and whether it is an example of its class.

    Tokens are of one class if they have the same moves, which is seen by a hash of 64 bits.
    """
    marks = np.zeros(size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for tokens, froms, tos in moves:
            marks[tokens] += hashed(froms * states + tos).sum()
    _, first, classes = np.unique(
        np.r_[np.uint64(0), marks], return_index=True, return_inverse=True
    )
    examples = np.zeros(size, dtype=bool)
    examples[first[1:] - 1] = True
    return classes[1:].astype(np.int32), examples


def bundled(table: Table) -> tuple[Ids, Ids, Ids, Spans]:
    """Pairs of states of a table, by bundles of the classes that lead from one to the other."""
    states, kinds = np.nonzero(table >= 0)
    numbers = states * len(table) + table[states, kinds]
    order = numbers.argsort(kind="stable")
    numbers, kinds = numbers[order], kinds[order]
    new = np.diff(numbers, prepend=-1) != 0
    _, first, bundles = np.unique(
        np.add.reduceat(hashed(kinds), np.flatnonzero(new)), return_index=True, return_inverse=True
    )
    own = Spans(new.cumsum() - 1, len(bundles))
    which, members = own.of(first)
    pairs = np.stack(np.divmod(numbers[new], len(table)))
    return pairs, bundles, kinds[members], Spans(which, len(first))


def hashed(numbers: Ids) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Numbers as words that do not add up by chance (splitmix64's finalizer)."""
    return mix(numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def distances(froms: Ids, tos: Ids, accepts: Flags) -> Ids:
    """Fewest steps from each state to one that accepts."""
    order = tos.argsort(kind="stable")
    before, froms = Spans(tos[order], len(accepts)), froms[order]
    left, steps, found = np.where(accepts, 0, NEVER), 0, np.flatnonzero(accepts)
    while len(found):
        steps += 1
        near = froms[before.of(found)[1]]
        found = np.unique(near[left[near] == NEVER])
        left[found] = steps
    return left
