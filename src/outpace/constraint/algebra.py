"""What deterministic automata have in common, and what one has without another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import numpy as np

from outpace.constraint.charset import Span
from outpace.constraint.dfa import MANY, Dfa, Ids, Table, trimmed
from outpace.constraint.pattern import Net, TooLarge

MOST_PAIRS = 20_000
"""States of a product: a fraction of a second."""


Edges = list[list[tuple[Span, int]]]

ROUNDS = 64
"""Rounds in which an automaton is made smaller: about the length of its texts."""


def intersection(one: Dfa, other: Dfa) -> Dfa:
    """The automaton of texts that both accept; without states where there are none."""
    return product(one, other, minus=False)


def difference(one: Dfa, other: Dfa) -> Dfa:
    """The automaton of texts that the first accepts and the second does not."""
    return product(one, other, minus=True)


def product(one: Dfa, other: Dfa, *, minus: bool) -> Dfa:
    """The automaton over pairs of states. Raises `TooLarge` where there are too many."""
    if not (len(one.table) and len(other.table)):
        return one if minus else Dfa(one.table[:0], one.accepts[:0])
    (left, right), kinds = columns(one.table, other.table)
    lefts, rights = left.tolist(), right.tolist()
    number = {(0, 0): 0}
    rows: list[list[int]] = []
    before: list[list[int]] = [[]]
    for a, b in (waiting := [(0, 0)]):
        row = []
        for target in zip(lefts[a], rights[b] if b >= 0 else [-1] * len(lefts[a]), strict=True):
            if target[0] < 0 or (target[1] < 0 and not minus):
                row.append(-1)
                continue
            if target not in number:
                number[target] = len(waiting)
                waiting.append(target)
                before.append([])
            row.append(number[target])
            before[number[target]].append(len(rows))
        rows.append(row)
        if len(waiting) > MOST_PAIRS:
            raise TooLarge(MANY)
    firsts, seconds = np.array(waiting).T
    inside = np.append(other.accepts, False)[seconds]  # -1 is the last one: no state
    accepts = one.accepts[firsts] & (~inside if minus else inside)
    return trimmed(np.array(rows, dtype=np.int32)[:, kinds], accepts, before)


def columns(*tables: Table) -> tuple[list[Table], Ids]:
    """Tables with one column for bytes that do the same in each, and the column of each byte."""
    _, first, kinds = np.unique(np.vstack(tables), axis=1, return_index=True, return_inverse=True)
    return [table[:, first] for table in tables], kinds.reshape(-1)


def minimal(dfa: Dfa) -> Dfa:
    """The automaton of the same texts with fewest states, or itself if it is large (Moore)."""
    if not len(dfa.table):
        return dfa
    (table,), kinds = columns(dfa.table)
    labels, count = dfa.accepts.astype(np.int64), 0
    for _ in range(ROUNDS):
        rows = np.column_stack([labels, np.append(labels, -1)[table]])
        _, example, labels = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        labels = labels.reshape(-1)
        if len(example) == count:
            break
        count = len(example)
    else:
        return dfa
    order = np.argsort(np.arange(count) != labels[0], kind="stable")  # that of state 0 is first
    number = np.argsort(order)
    states = example[order]
    targets = np.append(number[labels], -1)[table[states]]
    return Dfa(targets[:, kinds].astype(np.int32), dfa.accepts[states])


def accepted(dfa: Dfa, text: bytes) -> bool:
    """Whether an automaton accepts a text."""
    state = 0 if len(dfa.table) else -1
    for byte in text:
        if state < 0:
            return False
        state = int(dfa.table[state, byte])
    return state >= 0 and bool(dfa.accepts[state])


def embed(edges: Edges, accepts: Sequence[bool], net: Net, at: int) -> int:
    """Add an automaton to a net, from state `at` on; where its whole texts lead.

    `edges` are those of its states.
    """
    first = len(net.edges)
    for own in edges:
        net.edges[net.state()] = [(span, first + target) for span, target in own]
    end = net.state()
    if edges:
        net.free[at].append(first)
    for state, ends in enumerate(accepts, first):
        if ends:
            net.free[state].append(end)
    return end


def edges_of(dfa: Dfa) -> Edges:
    """The spans of bytes that lead from each state to others."""
    edges: Edges = []
    for row in dfa.table:
        cuts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), 256]
        targets = row[cuts[:-1]].tolist()
        spans = zip(pairwise(cuts), targets, strict=True)
        edges.append([((low, high - 1), target) for (low, high), target in spans if target >= 0])
    return edges


def shortest(dfa: Dfa) -> float:
    """Bytes of the shortest text that an automaton accepts; infinite where there is none."""
    reached, count = np.zeros(1, dtype=np.int32), 0
    seen = np.zeros(len(dfa.table), dtype=bool)
    while len(dfa.table) and len(reached):
        if dfa.accepts[reached].any():
            return count
        seen[reached] = True
        after = np.unique(dfa.table[reached])
        reached, count = after[(after >= 0) & ~seen[after]], count + 1
    return inf
