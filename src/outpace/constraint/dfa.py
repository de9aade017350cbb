"""Deterministic automata over bytes, and their algebra."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from math import inf
from threading import Lock
from typing import ParamSpec

import numpy as np
from numpy.typing import NDArray

from outpace.constraint.pattern import CodeRange, Nfa, TextRoom, TooLargeError, pattern_nfa

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
    """A deterministic automaton; strings begin in state 0."""

    table: TransitionTable
    """Target state per state and byte, `[S, 256]`; -1 where no text continues."""
    accepts: StateFlags
    """Whether a string may end in a state, `[S]`."""
    num_open: int = 0
    """Number of first states in which a string is free text. It may end there, and an answer that
    reaches its limit there is cut off."""
    thoughts: range = range(0)
    """States of thoughts; those after them are of the answer."""

    @classmethod
    def from_pattern(cls, pattern: str, *, room: TextRoom = None) -> Dfa:
        dfa = determinize_nfa(pattern_nfa(pattern, room=room))
        if not len(dfa.table):
            raise ValueError("no text matches it")
        return dfa

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Dfa:
        """Return the automaton of some strings, as a prefix tree."""
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


MAX_KEPT_BYTES = 16 * 2**20
"""Maximum memory of the automata of `keep_dfas`, with their keys."""

P = ParamSpec("P")


class DfaCache:
    """The most recent automata of any functions, by function and arguments."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.entries: OrderedDict[object, tuple[Dfa, int]] = OrderedDict()
        self.num_bytes = 0

    def keep_dfas(self, build: Callable[P, Dfa]) -> Callable[P, Dfa]:
        """Return a function that builds the automaton of equal positional arguments once.

        Keyword arguments limit the work.
        """

        @wraps(build)
        def lookup(*args: P.args, **kwargs: P.kwargs) -> Dfa:
            key = build, args
            with self.lock:
                if (found := self.entries.get(key)) is not None:
                    self.entries.move_to_end(key)
                    return found[0]
            dfa = build(*args, **kwargs)
            with self.lock:
                size = dfa.table.nbytes + 4 * len(str(key))
                self.num_bytes += size if key not in self.entries else 0
                self.entries.setdefault(key, (dfa, size))
                while self.num_bytes > MAX_KEPT_BYTES:
                    self.num_bytes -= self.entries.popitem(last=False)[1][1]
            return dfa

        return lookup


keep_dfas = DfaCache().keep_dfas


def search_table(mark: bytes) -> TransitionTable:
    """Return the table of a search for a mark, `[len(mark), 256]` (Knuth et al., 1977)."""
    # State n has read n characters of it; the state `len(mark)` has read all.
    table = np.zeros((len(mark), 256), dtype=np.int32)
    for state, byte in enumerate(mark):
        if state:
            table[state] = table[overlap(mark[:state])]
        table[state, byte] = state + 1
    return table


def overlap(prefix: bytes) -> int:
    """Return the length of the longest end of `prefix` that also begins it."""
    return next(n for n in range(len(prefix) - 1, -1, -1) if prefix.endswith(prefix[:n]))


PAUSE: ContextVar[Callable[[], object]] = ContextVar("PAUSE", default=lambda: None)
"""Function that a compilation calls after each part of its work, some microseconds or more."""


@dataclass(slots=True)
class StepBudget:
    """Work that is left to determinize one or several automata."""

    left: int = MAX_DETERMINIZE_STEPS

    def spend(self, steps: int) -> None:
        PAUSE.get()()
        self.left -= steps
        if self.left < 0:
            raise TooLargeError(TOO_MANY_STATES)


def determinize_nfa(net: Nfa, budget: StepBudget | None = None) -> Dfa:
    """Return the automaton of an NFA, without states from which no text can be finished."""
    budget = budget or StepBudget()
    budget.spend(len(net.edges))
    # Bytes that no transition distinguishes share a class, so most rows are short.
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


MAX_PRODUCT_STATES = 20_000
"""Maximum number of states of a product; takes a fraction of a second."""


StateEdges = list[list[tuple[CodeRange, int]]]

MAX_MINIMIZE_ROUNDS = 64
"""Maximum rounds of minimization; about the length of the automaton's strings is needed."""


def intersect_dfas(one: Dfa, other: Dfa) -> Dfa:
    return product_dfa(one, other, minus=False)


def subtract_dfa(one: Dfa, other: Dfa) -> Dfa:
    """Return the automaton of strings that the first accepts and the second does not."""
    return product_dfa(one, other, minus=True)


def product_dfa(one: Dfa, other: Dfa, *, minus: bool) -> Dfa:
    if not (len(one.table) and len(other.table)):
        return one if minus else Dfa(one.table[:0], one.accepts[:0])
    (left, right), kinds = distinct_columns(one.table, other.table)
    lefts, rights = left.tolist(), right.tolist()
    number = {(0, 0): 0}
    rows: list[list[int]] = []
    before: list[list[int]] = [[]]
    for a, b in (pairs := [(0, 0)]):
        PAUSE.get()()
        row = []
        for target in zip(lefts[a], rights[b] if b >= 0 else [-1] * len(lefts[a]), strict=True):
            # In a difference, texts that the other automaton has left go on.
            if target[0] < 0 or (target[1] < 0 and not minus):
                row.append(-1)
                continue
            if target not in number:
                number[target] = len(pairs)
                pairs.append(target)
                before.append([])
            row.append(number[target])
            before[number[target]].append(len(rows))
        rows.append(row)
        if len(pairs) > MAX_PRODUCT_STATES:
            raise TooLargeError(TOO_MANY_STATES)
    firsts, seconds = np.array(pairs).T
    inside = np.append(other.accepts, False)[seconds]  # index -1, no state, is the last entry
    accepts = one.accepts[firsts] & (~inside if minus else inside)
    return trim_dfa(np.array(rows, dtype=np.int32)[:, kinds], accepts, before)


def distinct_columns(*tables: TransitionTable) -> tuple[list[TransitionTable], IndexArray]:
    _, first, kinds = np.unique(np.vstack(tables), axis=1, return_index=True, return_inverse=True)
    return [table[:, first] for table in tables], kinds.reshape(-1)


def minimize_dfa(dfa: Dfa) -> Dfa:
    """Minimize an automaton (Moore); return large ones unchanged."""
    if not len(dfa.table):
        return dfa
    (table,), kinds = distinct_columns(dfa.table)
    labels, count = dfa.accepts.astype(np.int64), 0
    for _ in range(MAX_MINIMIZE_ROUNDS):
        rows = np.column_stack([labels, np.append(labels, -1)[table]])
        _, example, labels = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        labels = labels.reshape(-1)
        if len(example) == count:
            break
        count = len(example)
    else:
        return dfa
    order = np.argsort(np.arange(count) != labels[0], kind="stable")  # keeps state 0 first
    number = np.argsort(order)
    states = example[order]
    targets = np.append(number[labels], -1)[table[states]]
    return Dfa(targets[:, kinds].astype(np.int32), dfa.accepts[states])


def dfa_accepts(dfa: Dfa, text: bytes) -> bool:
    state = dfa.walk(text) if len(dfa.table) else -1
    return state >= 0 and bool(dfa.accepts[state])


def embed_dfa(edges: StateEdges, accepts: Sequence[bool], net: Nfa, at: int) -> int:
    """Add an automaton to an NFA after state `at`.

    Returns:
        State that whole strings lead to.
    """
    first = len(net.edges)
    for own in edges:
        net.edges[net.add_state()] = [(span, first + target) for span, target in own]
    end = net.add_state()
    if edges:
        net.epsilon_edges[at].append(first)
    for state, ends in enumerate(accepts, first):
        if ends:
            net.epsilon_edges[state].append(end)
    return end


def dfa_edges(dfa: Dfa) -> StateEdges:
    """Return the byte ranges that lead from each state to others."""
    edges: StateEdges = [[] for _ in dfa.table]
    starts = np.diff(dfa.table, axis=1, prepend=-2) != 0
    states, lows = np.nonzero(starts)
    highs = np.append(lows[1:], 0) - 1  # the next range, or the next state, begins there
    targets = dfa.table[states, lows]
    found = zip(
        states.tolist(), lows.tolist(), (highs % 256).tolist(), targets.tolist(), strict=True
    )
    for state, low, high, target in found:
        if target >= 0:
            edges[state].append(((low, high), target))
    return edges


def shortest_length(dfa: Dfa) -> float:
    """Return the bytes of the shortest accepted text, or infinity without one."""
    reached, count = np.zeros(1, dtype=np.int32), 0
    seen = np.zeros(len(dfa.table), dtype=bool)
    while len(dfa.table) and len(reached):
        if dfa.accepts[reached].any():
            return count
        seen[reached] = True
        after = np.unique(dfa.table[reached])
        reached, count = after[(after >= 0) & ~seen[after]], count + 1
    return inf
