"""Deterministic automata over bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outpace.constraint.pattern import Nfa, TextRoom, TooLargeError, pattern_nfa

MAX_DETERMINIZE_STEPS = 1_000_000
"""Maximum NFA states visited to determinize it; takes about half a second."""

MAX_CHOICE_STATES = 20_000
"""Maximum states of the prefix tree of choices."""

TOO_MANY_STATES = (
    "it is too large: its automaton has too many states; simplify it or shorten its repeats"
)

TransitionTable = NDArray[np.int32]
StateFlags = NDArray[np.bool_]
IndexArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """A deterministic automaton; strings begin in state 0.

    Attributes:
        table: target state per state and byte, `[S, 256]`; -1 where no text continues.
        accepts: whether a string may end in a state, `[S]`.
        num_open: number of first states in which a string is free text. It may end there, and an
            answer that reaches its limit there is cut off.
        thoughts: states of thoughts; those after them are of the answer.
    """

    table: TransitionTable
    accepts: StateFlags
    num_open: int = 0
    thoughts: range = range(0)

    @classmethod
    def from_pattern(cls, pattern: str, *, room: TextRoom = None) -> Dfa:
        """Return the automaton of a regular expression.

        Raises:
            ValueError: as `pattern_nfa`, or if no text matches.
        """
        dfa = determinize_nfa(pattern_nfa(pattern, room=room))
        if not len(dfa.table):
            raise ValueError("no text matches it")
        return dfa

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Dfa:
        """Return the automaton of some strings, as a prefix tree.

        Raises:
            TooLargeError: if they are too many or too long.
        """
        rows: list[dict[int, int]] = [{}]
        whole = set()
        for text in texts:
            state = 0
            for byte in text.encode():
                if byte not in rows[state]:
                    rows[state][byte] = len(rows)
                    rows.append({})
                state = rows[state][byte]
            whole.add(state)
            if len(rows) > MAX_CHOICE_STATES:
                raise TooLargeError(
                    f"it is too large: texts that differ in {MAX_CHOICE_STATES} bytes"
                )
        table = np.full((len(rows), 256), -1, dtype=np.int32)
        for state, row in enumerate(rows):
            table[state, list(row)] = list(row.values())
        return cls(table, np.isin(np.arange(len(rows)), list(whole)))

    def walk(self, text: bytes) -> int:
        """Return the state after a text; -1 if no text of the automaton begins with it."""
        state = 0
        for byte in text:
            if state >= 0:
                state = int(self.table[state, byte])
        return state


def search_table(mark: bytes) -> TransitionTable:
    """Return the table of a search for a mark, `[len(mark), 256]` (Knuth et al., 1977).

    State n has read n characters of it; the state `len(mark)` has read all.
    """
    table = np.zeros((len(mark), 256), dtype=np.int32)
    for state, byte in enumerate(mark):
        if state:
            table[state] = table[overlap(mark[:state])]
        table[state, byte] = state + 1
    return table


def overlap(prefix: bytes) -> int:
    """Return the length of the longest end of `prefix` that also begins it."""
    return next(n for n in range(len(prefix) - 1, -1, -1) if prefix.endswith(prefix[:n]))


@dataclass(slots=True)
class StepBudget:
    """Work that is left to determinize one or several automata."""

    left: int = MAX_DETERMINIZE_STEPS

    def spend(self, steps: int) -> None:
        """Subtract steps; raises `TooLargeError` if none are left."""
        self.left -= steps
        if self.left < 0:
            raise TooLargeError(TOO_MANY_STATES)


def determinize_nfa(net: Nfa, budget: StepBudget | None = None) -> Dfa:
    """Return the automaton of an NFA, without states from which no text can be finished.

    Args:
        net: The NFA.
        budget: Work that is left, by default `MAX_DETERMINIZE_STEPS`.

    Raises:
        TooLargeError: if it has too many states (Rabin and Scott, 1959: up to 2^n).
    """
    cuts = sorted({0, 256, *(e for each in net.edges for (a, b), _ in each for e in (a, b + 1))})
    place = {cut: index for index, cut in enumerate(cuts)}
    closed = epsilon_closures(net)
    moves: list[ByteMoves] = [
        [(range(place[low], place[high + 1]), closed[target]) for (low, high), target in each]
        for each in net.edges
    ]
    number = {closed[0]: 0}
    waiting = deque(number)
    before: list[list[int]] = [[]]  # predecessors of each state
    rows: list[list[int]] = []
    budget = budget or StepBudget()
    while waiting:
        reached, cost = step_states(moves, waiting.popleft(), len(cuts) - 1)
        budget.spend(cost)
        row = []
        for members in map(frozenset, reached):
            if members and members not in number:
                number[members] = len(number)
                waiting.append(members)
                before.append([])
            row.append(number[members] if members else -1)
        for target in {*row} - {-1}:
            before[target].append(len(rows))
        rows.append(row)
    table = np.repeat(np.array(rows, dtype=np.int32), np.diff(cuts), axis=1)
    return trim_dfa(table, np.array([net.end in members for members in number]), before)


ByteMoves = list[tuple[range, frozenset[int]]]
"""Transitions of an NFA state: ranges of byte classes, and their target states."""


def step_states(
    moves: list[ByteMoves], members: frozenset[int], classes: int
) -> tuple[list[set[int]], int]:
    """Return the targets of each byte class from several states at once, and the work it took."""
    reached: list[set[int]] = [set() for _ in range(classes)]
    cost = classes
    for member in members:
        for span, targets in moves[member]:
            cost += len(span) * (1 + len(targets))
            for index in span:
                reached[index] |= targets
    return reached, cost


def epsilon_closures(net: Nfa) -> list[frozenset[int]]:
    """Return the useful states that each NFA state reaches without a byte.

    Useful states have byte transitions or end strings.
    """
    result, work = [], 0
    for state in range(len(net.epsilon_edges)):
        seen, stack = {state}, [state]
        while stack:
            for other in net.epsilon_edges[stack.pop()]:
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        result.append(frozenset(each for each in seen if net.edges[each] or each == net.end))
        if (work := work + len(seen)) > MAX_DETERMINIZE_STEPS:
            raise TooLargeError(TOO_MANY_STATES)
    return result


def trim_dfa(table: TransitionTable, accepts: StateFlags, before: list[list[int]]) -> Dfa:
    """Return an automaton without states from which no text can be finished."""
    alive = accepts.copy()
    stack = np.flatnonzero(accepts).tolist()
    while stack:
        for state in before[stack.pop()]:
            if not alive[state]:
                alive[state] = True
                stack.append(state)
    number = np.full(len(alive) + 1, -1, dtype=np.int32)
    number[:-1][alive] = np.arange(alive.sum())
    return Dfa(number[table[alive]] if alive[0] else table[:0], accepts[alive])
