"""Automata over tokens: which answers there are, and how short they may be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from outpace.constraint.dfa import Dfa, Flags, Table
from outpace.constraint.pattern import TooLarge
from outpace.constraint.vocabulary import Ids, Vocabulary
from outpace.decoding.noise import mix

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
        froms, kinds, tos: `[E]`, the entries of the table that lead somewhere, by state.
        pairs: `[2, P]`, states of which some token leads from one to the other.
    """

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        tokens, froms, tos = self.moves(dfa, vocabulary, ends)
        self.classes, kinds, chosen = classified(
            tokens, froms, tos, vocabulary.size, len(dfa.table)
        )
        last, end = int(self.classes.max()) + 1, len(dfa.table)
        if (end + 1) * (last + 1) > MOST_ENTRIES:
            raise TooLarge(f"it is too large: {end} states and {last} classes of tokens")
        self.classes[list(ends)] = last
        self.accepts = np.r_[dfa.accepts, True]
        self.left = distances(froms[chosen], tos[chosen], self.accepts)
        self.table = np.full((end + 1, last + 1), -1, dtype=np.int32)
        self.table[froms[chosen], kinds] = tos[chosen]
        self.table[self.left[self.table] == NEVER] = -1
        self.table[self.accepts, last] = end
        self.table[end] = end
        self.list_entries()

    def list_entries(self) -> None:
        """The entries of the table, and the pairs of states that they connect."""
        self.froms, self.kinds = np.nonzero(self.table >= 0)
        self.tos = self.table[self.froms, self.kinds].astype(np.int64)
        self.pairs = np.unique(np.stack((self.froms, self.tos)), axis=1)

    @staticmethod
    def moves(dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> tuple[Ids, Ids, Ids]:
        """All tokens that may follow a state, the state, and where they lead."""
        parts = list(zip(*vocabulary.moves(dfa), strict=True))
        tokens, froms, tos = (np.concatenate(part) for part in parts)
        text = ~np.isin(tokens, list(ends))
        return tokens[text], froms[text], tos[text]

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
        return int(self.left[self.left < len(self.left)].max())

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

    def follows(self, states: Flags) -> Flags:
        """Which states some token leads to from `states [S]`."""
        reached = np.zeros_like(states)
        reached[self.pairs[1][states[self.pairs[0]]]] = True
        return reached

    def precedes(self, states: Flags) -> Flags:
        """From which states some token leads to one of `states [S]`."""
        reached = np.zeros_like(states)
        reached[self.pairs[0][states[self.pairs[1]]]] = True
        return reached


def classified(tokens: Ids, froms: Ids, tos: Ids, size: int, states: int) -> tuple[Table, Ids, Ids]:
    """The class of each of `size` tokens; of one token of each class, its class and its moves.

    Tokens are of one class if they have the same moves, which is seen by a hash of 64 bits.
    """
    marks = np.zeros(size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        np.add.at(marks, tokens, hashed(froms * states + tos))
    _, first, classes = np.unique(
        np.r_[np.uint64(0), marks], return_index=True, return_inverse=True
    )
    example = np.zeros(size, dtype=bool)
    example[first[1:] - 1] = True
    chosen = np.flatnonzero(example[tokens])
    kinds: Table = classes[1:].astype(np.int32)
    return kinds, kinds[tokens[chosen]].astype(np.int64), chosen.astype(np.int64)


def hashed(numbers: Ids) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Numbers as words that do not add up by chance (splitmix64's finalizer)."""
    return mix(numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))


def distances(froms: Ids, tos: Ids, accepts: Flags) -> Ids:
    """Fewest steps from each state to one that accepts."""
    left = np.where(accepts, 0, NEVER)
    before: dict[int, set[int]] = {}
    for source, target in zip(froms.tolist(), tos.tolist(), strict=True):
        before.setdefault(target, set()).add(source)
    waiting = deque(np.flatnonzero(accepts).tolist())
    while waiting:
        state = waiting.popleft()
        for other in before.pop(state, ()):
            if left[other] == NEVER:
                left[other] = left[state] + 1
                waiting.append(other)
    return left
