"""Deterministic automata over bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outpace.constraint.pattern import Net, Room, TooLarge, net_of

WORK = 1_000_000
"""States of a net that may be looked at to make an automaton: half a second or so."""

MOST_CHOSEN = 20_000
"""States of the tree of some choices."""

MANY = "it is too large: its automaton has too many states; simplify it or shorten its repeats"

Table = NDArray[np.int32]
Flags = NDArray[np.bool_]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Dfa:
    """A deterministic automaton; state 0 is where texts begin.

    Attributes:
        table: `[S, 256]`, where a byte leads from a state, -1 where no whole text goes on so.
        accepts: `[S]`, whether a text may end there.
    """

    table: Table
    accepts: Flags

    @classmethod
    def of(cls, pattern: str, *, room: Room = None) -> Dfa:
        """That of a regular expression. Raises `ValueError` as `net_of`, and where it is empty."""
        dfa = determined(net_of(pattern, room=room))
        if not len(dfa.table):
            raise ValueError("no text at all fulfils it")
        return dfa

    @classmethod
    def among(cls, texts: Iterable[str]) -> Dfa:
        """That of some texts, as a tree. Raises `TooLarge` where they are too many or too long."""
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
            if len(rows) > MOST_CHOSEN:
                raise TooLarge(f"it is too large: texts that differ in {MOST_CHOSEN} places")
        table = np.full((len(rows), 256), -1, dtype=np.int32)
        for state, row in enumerate(rows):
            table[state, list(row)] = list(row.values())
        return cls(table, np.isin(np.arange(len(rows)), list(whole)))


def determined(net: Net) -> Dfa:
    """The automaton of a net, without states from which no text can be finished.

    Raises `TooLarge` where it has too many states (Rabin and Scott, 1959: up to 2^n).
    """
    cuts = sorted({0, 256, *(e for each in net.edges for (a, b), _ in each for e in (a, b + 1))})
    place = {cut: index for index, cut in enumerate(cuts)}
    closed = closures(net)
    moves: list[Moves] = [
        [(range(place[low], place[high + 1]), closed[target]) for (low, high), target in each]
        for each in net.edges
    ]
    number = {closed[0]: 0}
    waiting = deque(number)
    before: list[list[int]] = [[]]  # states that lead to each
    rows: list[list[int]] = []
    work = 0
    while waiting:
        reached, cost = step(moves, waiting.popleft(), len(cuts) - 1)
        if (work := work + cost) > WORK:
            raise TooLarge(MANY)
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
    return trimmed(table, np.array([net.end in members for members in number]), before)


Moves = list[tuple[range, frozenset[int]]]
"""Of a state: classes of bytes, and the states to which they lead."""


def step(moves: list[Moves], members: frozenset[int], classes: int) -> tuple[list[set[int]], int]:
    """Where each class of bytes leads from several states at once, and what it cost to find out."""
    reached: list[set[int]] = [set() for _ in range(classes)]
    cost = classes
    for member in members:
        for span, targets in moves[member]:
            cost += len(span) * (1 + len(targets))
            for index in span:
                reached[index] |= targets
    return reached, cost


def closures(net: Net) -> list[frozenset[int]]:
    """What each state of a net reaches with nothing, as far as bytes lead on or texts end there."""
    result, work = [], 0
    for state in range(len(net.free)):
        seen, stack = {state}, [state]
        while stack:
            for other in net.free[stack.pop()]:
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        result.append(frozenset(each for each in seen if net.edges[each] or each == net.end))
        if (work := work + len(seen)) > WORK:
            raise TooLarge(MANY)
    return result


def trimmed(table: Table, accepts: Flags, before: list[list[int]]) -> Dfa:
    """An automaton without states from which no text can be finished."""
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
