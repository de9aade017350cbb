"""Automata over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outpace.constraint.dfa import Dfa, Flags, Ids, Table
from outpace.constraint.pattern import TooLarge
from outpace.constraint.vocabulary import Spans, Vocabulary
from outpace.decoding.noise import mix

HOLE = -1
"""Class of an unknown token."""

NEVER = 2**30
"""Distance of states from which no end can be reached."""

MOST_ENTRIES = 20_000_000
"""Maximum size of the table of an automaton."""


class Automaton:
    """A deterministic automaton over the tokens of a vocabulary.

    Texts begin in state 0. Where a text may end, a token of `ends` leads to the last state, in
    which everything is padding. Tokens with equal transitions share a class: class 0 leads nowhere,
    the last class is that of `ends`. Classes that lead from one state to another form a bundle.

    Attributes:
        classes: class of each token, `[V]`.
        table: target state per state and class, `[S, C]`; -1 where no answer continues.
        accepts: whether an answer may end in a state, `[S]`.
        tokens_to_end: minimum number of tokens to an accepting state, `[S]`.
        token_order: tokens sorted by class, `[V]`.
        class_spans: range of each class in that order.
        used_classes: classes with tokens.
        pairs: pairs of states connected by a token, sorted, `[2, P]`.
        pair_spans: range of the pairs of each source state.
        pair_bundles: bundle of each pair, `[P]`.
        bundle_classes: concatenated classes of the bundles.
        bundle_spans: range of each bundle in `bundle_classes`.
    """

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        text, end = np.ones(vocabulary.size, dtype=bool), len(dfa.table)
        text[list(ends)] = False
        found = ((ids[text[ids]], froms, tos) for ids, froms, tos in vocabulary.moves(dfa))
        moves = [move for move in found if len(move[0])]
        self.classes, examples = classified(moves, vocabulary.size, end)
        last = int(self.classes.max()) + 1
        if (end + 1) * (last + 1) > MOST_ENTRIES:
            raise TooLarge(f"it is too large: {end} states and {last} token classes")
        self.classes[list(ends)] = last
        self.accepts = np.r_[dfa.accepts, True]
        numbers = [froms * (end + 1) + tos for _, froms, tos in moves]
        pair_numbers = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *numbers]))
        self.left = distances(*np.divmod(pair_numbers, end + 1), self.accepts)
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
        """Let end-of-sequence follow whole texts, and any token follow that."""
        self.table[self.accepts, -1] = self.end
        self.table[self.end] = self.end

    @property
    def end(self) -> int:
        """State after an end-of-sequence."""
        return len(self.accepts) - 1

    @property
    def shortest(self) -> int:
        """Number of tokens of the shortest answer."""
        return int(self.left[0])

    @property
    def far(self) -> int:
        """Remaining places above which the states that can finish do not change."""
        return int(self.left[self.left < NEVER].max())

    def finishes(self, room: int) -> Flags:
        """Return the states `[S]` from which an answer can be finished in `room` places."""
        return self.left <= room

    def walk(self, tokens: Sequence[int], state: int = 0) -> list[int]:
        """Return the state after each token, up to the first that is not part of an answer."""
        states = []
        for token in tokens:
            state = int(self.table[state, self.classes[token]])
            if state < 0:
                break
            states.append(state)
        return states

    def leading(self, states: Ids, kind: int) -> tuple[Ids, Ids, Ids]:
        """Return the transitions of a class, or any with `HOLE_CLASS`, from some states.

        Returns:
            For each transition its index among `states`, its target state, and its index among
            the pairs.
        """
        if kind == HOLE:
            which, places = self.own.of(states)
            return which, self.pairs[1][places], places
        targets = self.table[states, kind].astype(np.int64)
        which = np.flatnonzero(targets >= 0)
        return which, targets[which], which

    def follows(self, states: Flags, kind: int) -> Flags:
        """Return the states reached from `states [S]` by a class, or any with `HOLE_CLASS`."""
        reached = np.zeros_like(states)
        if kind == HOLE:
            reached[self.pairs[1][states[self.pairs[0]]]] = True
        else:
            targets = self.table[states, kind]
            reached[targets[targets >= 0]] = True
        return reached

    def precedes(self, states: Flags, kind: int) -> Flags:
        """Return the states from which a class, or any with `HOLE_CLASS`, leads to `states [S]`."""
        if kind != HOLE:
            targets = self.table[:, kind]
            return (targets >= 0) & states[targets]
        reached = np.zeros_like(states)
        reached[self.pairs[0][states[self.pairs[1]]]] = True
        return reached


def classified(
    moves: Sequence[tuple[Ids, Ids, Ids]], size: int, states: int
) -> tuple[Table, Flags]:
    """Return the class of each of `size` tokens, and whether it is the example of its class.

    Tokens with equal transitions share a class; these are compared by a 64-bit hash.
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
    """Return pairs of states, the bundle of each, and concatenated classes with bundle ranges."""
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
    """Return hashes whose sums do not collide by chance (splitmix64's finalizer)."""
    return mix(numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def distances(froms: Ids, tos: Ids, accepts: Flags) -> Ids:
    """Return the minimum number of steps from each state to an accepting one."""
    order = tos.argsort(kind="stable")
    before, froms = Spans(tos[order], len(accepts)), froms[order]
    distance, steps, found = np.where(accepts, 0, NEVER), 0, np.flatnonzero(accepts)
    while len(found):
        steps += 1
        near = froms[before.of(found)[1]]
        found = np.unique(near[distance[near] == NEVER])
        distance[found] = steps
    return distance
