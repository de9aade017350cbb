"""States that an automaton can be in at each place of a template with holes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.constraint.automaton import HOLE_CLASS, UNREACHABLE, TokenAutomaton
from outpace.constraint.dfa import IndexArray, StateFlags

MAX_SET_BYTES = 64 * 2**20
"""Maximum bytes of cached sets and moves per automaton."""


class StateMoves:
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

    def __init__(
        self, automaton: TokenAutomaton, heads: StateFlags, tails: StateFlags, kind: int
    ) -> None:
        states = np.flatnonzero(heads)
        which, targets, places = automaton.transitions_from(states, kind)
        live = tails[targets]
        which, targets = which[live], targets[live]
        self.automaton = automaton
        self.bundles = automaton.pair_bundles[places[live]] if kind == HOLE_CLASS else which[:0]
        self.begins = np.flatnonzero(np.diff(which, prepend=-1))
        self.ends: IndexArray = np.append(self.begins, len(which))[1:]
        self.owners = np.repeat(np.arange(len(self.begins)), self.ends - self.begins)
        self.is_deterministic = len(self.begins) == len(which)
        self.single = int(states[which[0]]) if len(self.begins) == 1 else -1
        found = np.zeros(len(tails), dtype=bool)
        found[targets] = True
        self.tos = (found.cumsum() - 1)[targets]
        self.count = int(found.sum())
        self.mask: Tensor | None = None

    @property
    def token_classes(self) -> IndexArray:
        """Classes of all their tokens, possibly repeated."""
        return self.automaton.bundle_classes[
            self.automaton.bundle_spans.pairs_of(np.unique(self.bundles))[1]
        ]

    @property
    def banned_tokens(self) -> Tensor:
        """Tokens that no move takes, `bool[V]`."""
        if self.mask is None:
            allowed = np.zeros(self.automaton.table.shape[1], dtype=bool)
            allowed[self.token_classes] = True
            self.mask = torch.from_numpy(~allowed[self.automaton.classes])
        return self.mask

    @property
    def single_token(self) -> int | None:
        """The only possible token, or None."""
        if len(self.tos) != 1 or len(self.token_classes) != 1:
            return None
        same, kind = self.automaton.class_spans, self.token_classes[0]
        return (
            int(self.automaton.token_order[same.firsts[kind]]) if same.counts[kind] == 1 else None
        )


@dataclass(slots=True, eq=False)
class StateSet:
    """A set of states, with its cached successors and predecessors by class, and its answers."""

    flags: StateFlags
    after: dict[int, StateSet] = field(default_factory=dict)
    before: dict[int, StateSet] = field(default_factory=dict)
    moves: dict[tuple[StateSet, int], StateMoves] = field(default_factory=dict)
    answer: StateSet | None = None


class StateSets:
    """Distinct sets of states of an automaton, dropped together when they take too much memory."""

    def __init__(self, automaton: TokenAutomaton) -> None:
        self.automaton = automaton
        self.max_distance = automaton.max_distance
        self.clear_sets()

    def clear_sets(self) -> None:
        """Drop all sets; those in use remain valid."""
        self.by_flags: dict[bytes, StateSet] = {}
        self.by_state: dict[int, StateSet] = {}
        self.by_distance: dict[tuple[int, int | None], StateSet] = {}
        self.used_bytes = 0

    def lookup_flags(self, flags: StateFlags) -> StateSet:
        """Return the set of states `flags [S]`."""
        key = flags.tobytes()
        if key not in self.by_flags:
            self.count_bytes(len(flags))
            self.by_flags[key] = StateSet(flags)
        return self.by_flags[key]

    def count_bytes(self, size: int) -> None:
        """Count bytes that are cached from now on."""
        if self.used_bytes > MAX_SET_BYTES:
            self.clear_sets()
        self.used_bytes += size

    def single_state(self, state: int) -> StateSet:
        """Return the set of one state."""
        if state not in self.by_state:
            self.by_state[state] = self.lookup_flags(
                np.arange(len(self.automaton.tokens_to_end)) == state
            )
        return self.by_state[state]

    def states_within(self, left: int, thoughts: int | None = None) -> StateSet:
        """Return the states from which an answer can be finished with `left` tokens.

        Its thoughts end within `thoughts` tokens, if that is not None.
        """
        left = min(left, self.max_distance)
        if thoughts is not None:
            thoughts = min(max(thoughts, 0), len(self.automaton.thought_distances) - 1)
        if (key := (left, thoughts)) not in self.by_distance:
            self.by_distance[key] = self.lookup_flags(self.automaton.can_finish(*key))
        return self.by_distance[key]

    def states_after(self, states: StateSet, kind: int) -> StateSet:
        """Return the states that a class, or any with `HOLE_CLASS`, leads to."""
        if kind not in states.after:
            states.after[kind] = self.lookup_flags(self.automaton.successors(states.flags, kind))
        return states.after[kind]

    def states_before(self, states: StateSet, kind: int) -> StateSet:
        """Return the states from which a class, or any with `HOLE_CLASS`, leads to these."""
        if kind not in states.before:
            states.before[kind] = self.lookup_flags(self.automaton.predecessors(states.flags, kind))
        return states.before[kind]

    def answer_states(self, states: StateSet) -> StateSet:
        """Return those of some states that are not before the end of thoughts."""
        if states.answer is None:
            within = self.automaton.thought_distances[0] < UNREACHABLE
            states.answer = self.lookup_flags(states.flags & within)
        return states.answer

    def moves_between(self, heads: StateSet, tails: StateSet, kind: int = HOLE_CLASS) -> StateMoves:
        """Return the moves between two sets by a class, or any with `HOLE_CLASS`."""
        key = tails, kind
        if key not in heads.moves:
            found = heads.moves[key] = StateMoves(self.automaton, heads.flags, tails.flags, kind)
            self.count_bytes(32 * len(found.tos) + len(self.automaton.classes))
        return heads.moves[key]


class ReachableStates:
    """Possible states before each place of an answer.

    Args:
        sets: cached sets of the automaton.
        states: states before the places up to `first`: the first hole, or the first token that
            is part of no answer.
        kinds: classes from there on, or `HOLE_CLASS`; all later places are holes.
        room: number of places.
        deadline: place before which thoughts end, or None.
        both: whether tokens after a hole constrain it.
    """

    def __init__(
        self,
        sets: StateSets,
        states: Sequence[int],
        kinds: Sequence[int],
        *,
        room: int,
        deadline: int | None,
        both: bool,
    ) -> None:
        self.sets = sets
        self.states = states
        self.first = len(states) - 1
        self.kinds = kinds
        self.room, self.deadline = room, deadline
        self.heads = [sets.single_state(states[-1])]
        self.tails: list[StateSet] = []  # of the last places, in descending order
        filled = [place for place, kind in enumerate(kinds, self.first) if kind != HOLE_CLASS]
        self.last_filled_end = (
            filled[-1] + 1 if both and filled else 0
        )  # first place after the last token

    def class_at(self, place: int) -> int:
        """Return the class of the token at a place, or `HOLE_CLASS`."""
        offset = place - self.first
        return self.kinds[offset] if 0 <= offset < len(self.kinds) else HOLE_CLASS

    def head_states(self, place: int) -> StateSet:
        """Return the states that the tokens before a place can lead to."""
        if place < self.first:
            return self.sets.single_state(self.states[place])
        while len(self.heads) <= place - self.first:
            at = self.first + len(self.heads)
            found = self.sets.states_after(self.heads[-1], self.class_at(at - 1))
            self.heads.append(self.without_late_thoughts(found, at))
        return self.heads[place - self.first]

    def states_within_limits(self, place: int) -> StateSet:
        """Return the states before a place from which the places after it suffice."""
        thoughts = None if self.deadline is None else self.deadline - place
        return self.sets.states_within(self.room - place, thoughts)

    def states_leading_to(self, following: StateSet, place: int) -> StateSet:
        """Return the states before a place from which its token leads to some states."""
        found = self.sets.states_before(following, self.class_at(place))
        return self.without_late_thoughts(found, place)

    def without_late_thoughts(self, states: StateSet, place: int) -> StateSet:
        """Return those of some states in which thoughts may be before a place."""
        if self.deadline is None or place < self.deadline:
            return states
        return self.sets.answer_states(states)

    def tail_states(self, place: int) -> StateSet:
        """Return the states from which the tokens from a place on can be finished."""
        if place >= self.last_filled_end or place <= self.first:
            return self.states_within_limits(place)
        while len(self.tails) < self.last_filled_end - place:
            at = self.last_filled_end - len(self.tails) - 1
            following = self.tails[-1] if self.tails else self.tail_states(self.last_filled_end)
            self.tails.append(self.states_leading_to(following, at))
        return self.tails[self.last_filled_end - place - 1]

    def banned_at(self, place: int) -> Tensor:
        """Return the tokens that no answer has at a place, `bool[V]`."""
        return self.sets.moves_between(
            self.head_states(place), self.tail_states(place + 1)
        ).banned_tokens

    def moves_until(self, end: int) -> list[StateMoves]:
        """Return the moves from place to place, from the first hole to `end`."""
        tails = [self.tail_states(end)]
        for place in range(end - 1, self.first, -1):
            tails.append(self.states_leading_to(tails[-1], place))
        return [
            self.sets.moves_between(self.head_states(place), tail, self.class_at(place))
            for place, tail in enumerate(reversed(tails), self.first)
        ]
