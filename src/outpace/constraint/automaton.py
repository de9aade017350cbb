"""Automata over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from outpace.constraint.dfa import Dfa, IndexArray, StateFlags, TransitionTable
from outpace.constraint.pattern import TooLargeError
from outpace.constraint.vocabulary import OwnerSpans, Vocabulary
from outpace.decoding.sampling import splitmix64

HOLE_CLASS = -1
"""Class of an unknown token."""

UNREACHABLE = 2**30
"""Distance of states from which no end can be reached."""

MAX_AUTOMATON_ENTRIES = 20_000_000
"""Maximum size of the table of an automaton."""


class TokenAutomaton:
    """A deterministic automaton over the tokens of a vocabulary."""

    # Strings begin in state 0. Where one may end, a token of `ends` leads to the last state, in
    # which everything is padding. Tokens with equal transitions share a class: class 0 leads
    # nowhere, the last class is that of `ends`. Classes that lead from one state to another form a
    # bundle.

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        text, end = np.ones(vocabulary.size, dtype=bool), len(dfa.table)
        text[list(ends)] = False
        found = ((ids[text[ids]], froms, tos) for ids, froms, tos in vocabulary.token_moves(dfa))
        moves = [move for move in found if len(move[0])]
        self.classes, examples = classify_tokens(moves, vocabulary.size, end)
        """Class of each token, `[V]`."""
        last = int(self.classes.max()) + 1
        if (end + 1) * (last + 1) > MAX_AUTOMATON_ENTRIES:
            raise TooLargeError(f"it is too large: {end} states and {last} token classes")
        self.classes[list(ends)] = last
        self.accepts = np.r_[dfa.accepts, True]
        """Whether an answer may end in a state, `[S]`."""
        self.num_open, self.thoughts = dfa.num_open, dfa.thoughts
        numbers = [froms * (end + 1) + tos for _, froms, tos in moves]
        pair_numbers = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *numbers]))
        self.tokens_to_end = end_distances(*np.divmod(pair_numbers, end + 1), self.accepts)
        """Minimum number of tokens to an accepting state, `[S]`."""
        self.table = np.full((end + 1, last + 1), -1, dtype=np.int32)
        """Target state per state and class, `[S, C]`; -1 where no answer continues."""
        for tokens, froms, tos in moves:
            self.table[froms[:, None], self.classes[tokens[examples[tokens]]]] = tos[:, None]
        self.table[self.tokens_to_end[self.table] == UNREACHABLE] = -1
        self.add_padding()
        self.token_order = self.classes.argsort(kind="stable")
        """Tokens sorted by class, `[V]`."""
        self.class_spans = OwnerSpans(self.classes[self.token_order], last + 1)
        """Range of each class in that order."""
        self.used_classes = np.flatnonzero(self.class_spans.counts)
        """Classes with tokens."""
        self.pairs, self.pair_bundles, self.bundle_classes, self.bundle_spans = bundle_transitions(
            self.table
        )
        """Pairs of states that a token connects, sorted, `[2, P]`; the bundle of each pair, `[P]`;
        the concatenated classes of the bundles, and the range of each bundle in them."""
        self.pair_spans = OwnerSpans(self.pairs[0], end + 1)
        """Range of the pairs of each source state."""

    def add_padding(self) -> None:
        """Let end-of-sequence follow whole strings, and any token follow that."""
        self.table[self.accepts, -1] = self.end
        self.table[self.end] = self.end

    @property
    def num_bytes(self) -> int:
        return sum(map(count_bytes, vars(self).values()))

    @property
    def end(self) -> int:
        return len(self.accepts) - 1

    @property
    def min_tokens(self) -> int:
        return int(self.tokens_to_end[0])

    @cached_property
    def thought_distances(self) -> list[IndexArray]:
        """`tokens_to_end [S]` of texts whose thoughts end within 0, 1, 2 … tokens."""
        # More tokens than those of the last entry make no difference.
        outside = np.arange(len(self.accepts)) >= self.thoughts.stop
        found = [np.where(outside | self.accepts, self.tokens_to_end, UNREACHABLE)]
        while True:
            after = np.full_like(found[0], UNREACHABLE)
            np.minimum.at(after, self.pairs[0], found[-1][self.pairs[1]] + 1)
            after = np.minimum(after, found[0])
            if (after == found[-1]).all():
                return found
            found.append(after)

    def thought_deadline(self, count: int) -> int:
        """Return the place before which thoughts of `count` tokens end; the shortest answer fits.

        The tokens that end thoughts are not counted.
        """
        begin, closing = self.tokens_to_answer(0), self.tokens_to_answer(self.thoughts.start)
        return max(begin, count + closing)

    def tokens_to_answer(self, state: int) -> int:
        each = enumerate(self.thought_distances)
        return next(n for n, found in each if found[state] == self.tokens_to_end[state])

    @property
    def max_distance(self) -> int:
        """Remaining places above which the states that can finish do not change."""
        every = [self.tokens_to_end, *(self.thought_distances if self.thoughts else ())]
        return max(int(each[each < UNREACHABLE].max()) for each in every)

    def can_finish(self, room: int, thoughts: int | None = None) -> StateFlags:
        """Return the states `[S]` from which an answer can be finished in `room` places.

        Args:
            room: Number of places.
            thoughts: Number of tokens within which its thoughts end; None if that has no limit.
        """
        return (
            self.tokens_to_end if thoughts is None else self.thought_distances[thoughts]
        ) <= room

    def walk_tokens(self, tokens: Sequence[int], state: int = 0) -> list[int]:
        """Return the state after each token, up to the first that is not part of an answer."""
        states = []
        for token in tokens:
            state = int(self.table[state, self.classes[token]])
            if state < 0:
                break
            states.append(state)
        return states

    def transitions_from(
        self, states: IndexArray, kind: int
    ) -> tuple[IndexArray, IndexArray, IndexArray]:
        """Return the transitions of a class, or any with `HOLE_CLASS`, from some states.

        Returns:
            For each transition its index among `states`, its target state, and its index among
            the pairs.
        """
        if kind == HOLE_CLASS:
            which, places = self.pair_spans.pairs_of(states)
            return which, self.pairs[1][places], places
        targets = self.table[states, kind].astype(np.int64)
        which = np.flatnonzero(targets >= 0)
        return which, targets[which], which

    def successors(self, states: StateFlags, kind: int) -> StateFlags:
        """Return the states reached from `states [S]` by a class, or any with `HOLE_CLASS`."""
        reached = np.zeros_like(states)
        if kind == HOLE_CLASS:
            reached[self.pairs[1][states[self.pairs[0]]]] = True
        else:
            targets = self.table[states, kind]
            reached[targets[targets >= 0]] = True
        return reached

    def predecessors(self, states: StateFlags, kind: int) -> StateFlags:
        """Return the states from which a class, or any with `HOLE_CLASS`, leads to `states [S]`."""
        if kind != HOLE_CLASS:
            targets = self.table[:, kind]
            return (targets >= 0) & states[targets]
        reached = np.zeros_like(states)
        reached[self.pairs[0][states[self.pairs[1]]]] = True
        return reached


def count_bytes(value: object) -> int:
    """Return the memory of an array, or of those in a list or in ranges; 0 for anything else."""
    match value:
        case np.ndarray():
            return value.nbytes
        case list():
            return sum(map(count_bytes, value))
        case OwnerSpans():
            return value.counts.nbytes + value.firsts.nbytes
    return 0


def classify_tokens(
    moves: Sequence[tuple[IndexArray, IndexArray, IndexArray]], size: int, states: int
) -> tuple[TransitionTable, StateFlags]:
    """Return the class of each of `size` tokens, and whether it is the example of its class."""
    # Tokens with equal transitions share a class; these are compared by a 64-bit hash.
    marks = np.zeros(size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for tokens, froms, tos in moves:
            marks[tokens] += hash_numbers(froms * states + tos).sum()
    _, first, classes = np.unique(
        np.r_[np.uint64(0), marks], return_index=True, return_inverse=True
    )
    examples = np.zeros(size, dtype=bool)
    examples[first[1:] - 1] = True
    return classes[1:].astype(np.int32), examples


def bundle_transitions(
    table: TransitionTable,
) -> tuple[IndexArray, IndexArray, IndexArray, OwnerSpans]:
    states, kinds = np.nonzero(table >= 0)
    numbers = states * len(table) + table[states, kinds]
    order = numbers.argsort(kind="stable")
    numbers, kinds = numbers[order], kinds[order]
    new = np.diff(numbers, prepend=-1) != 0
    _, first, bundles = np.unique(
        np.add.reduceat(hash_numbers(kinds), np.flatnonzero(new)),
        return_index=True,
        return_inverse=True,
    )
    own = OwnerSpans(new.cumsum() - 1, len(bundles))
    which, members = own.pairs_of(first)
    pairs = np.stack(np.divmod(numbers[new], len(table)))
    return pairs, bundles, kinds[members], OwnerSpans(which, len(first))


def hash_numbers(numbers: IndexArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return hashes whose sums do not collide by chance (splitmix64's finalizer)."""
    return splitmix64(numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def end_distances(froms: IndexArray, tos: IndexArray, accepts: StateFlags) -> IndexArray:
    order = tos.argsort(kind="stable")
    before, froms = OwnerSpans(tos[order], len(accepts)), froms[order]
    distance, steps, found = np.where(accepts, 0, UNREACHABLE), 0, np.flatnonzero(accepts)
    while len(found):
        steps += 1
        near = froms[before.pairs_of(found)[1]]
        found = np.unique(near[distance[near] == UNREACHABLE])
        distance[found] = steps
    return distance
