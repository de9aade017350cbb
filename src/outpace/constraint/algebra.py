"""Operations on deterministic automata."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import numpy as np

from outpace.constraint.charset import CodeRange
from outpace.constraint.dfa import TOO_MANY_STATES, Dfa, IndexArray, TransitionTable, trim_dfa
from outpace.constraint.pattern import Nfa, TooLargeError

MAX_PRODUCT_STATES = 20_000
"""Maximum number of states of a product; takes a fraction of a second."""


StateEdges = list[list[tuple[CodeRange, int]]]

MAX_MINIMIZE_ROUNDS = 64
"""Maximum rounds of minimization; about the length of the automaton's strings is needed."""


def intersect_dfas(one: Dfa, other: Dfa) -> Dfa:
    """Return the automaton of strings that both accept, possibly without states."""
    return product_dfa(one, other, minus=False)


def subtract_dfa(one: Dfa, other: Dfa) -> Dfa:
    """Return the automaton of strings that the first accepts and the second does not."""
    return product_dfa(one, other, minus=True)


def product_dfa(one: Dfa, other: Dfa, *, minus: bool) -> Dfa:
    """Return the automaton over pairs of states.

    Raises:
        TooLargeError: if there are too many.
    """
    if not (len(one.table) and len(other.table)):
        return one if minus else Dfa(one.table[:0], one.accepts[:0])
    (left, right), kinds = distinct_columns(one.table, other.table)
    lefts, rights = left.tolist(), right.tolist()
    number = {(0, 0): 0}
    rows: list[list[int]] = []
    before: list[list[int]] = [[]]
    for a, b in (pairs := [(0, 0)]):
        row = []
        for target in zip(lefts[a], rights[b] if b >= 0 else [-1] * len(lefts[a]), strict=True):
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
    """Return tables with one column per group of equal bytes, and the column of each byte."""
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
    """Return whether an automaton accepts a string."""
    state = 0 if len(dfa.table) else -1
    for byte in text:
        if state < 0:
            return False
        state = int(dfa.table[state, byte])
    return state >= 0 and bool(dfa.accepts[state])


def embed_dfa(edges: StateEdges, accepts: Sequence[bool], net: Nfa, at: int) -> int:
    """Add an automaton to an NFA after state `at`.

    Args:
        edges: edges of each state of the automaton.
        accepts: whether each state accepts.
        net: NFA to extend.
        at: state after which the strings begin.

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
    edges: StateEdges = []
    for row in dfa.table:
        cuts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), 256]
        targets = row[cuts[:-1]].tolist()
        spans = zip(pairwise(cuts), targets, strict=True)
        edges.append([((low, high - 1), target) for (low, high), target in spans if target >= 0])
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
