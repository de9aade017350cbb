"""State of each slot of an answer in each forward of the target, computed from the trace."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from outpace.api.output import Output
from outpace.decoding import Step
from outpace.decoding.forward import IntArray

STATE_ABSENT, STATE_HOLE, STATE_FILLED, STATE_FULL, STATE_CACHED = range(5)
STATE_NAMES = ("absent", "hole", "filled by this forward", "filled before", "cached")
"""Descriptions of the states."""


def target_steps(output: Output) -> list[Step]:
    """Return the forwards of the target."""
    return [step for step in output.steps if step.model == "target"]


def is_scattered(output: Output) -> bool:
    """Return whether a forward ran in blocks, or had filled slots between mask positions."""
    return any(isinstance(step.pattern, tuple) or len(step.holes) > 1 for step in output.steps)


def block_edges(output: Output) -> list[int]:
    """Return the ends of all blocks, as slots of the answer."""
    patterns = ((step.start, step.pattern) for step in target_steps(output))
    ends = {
        start + end - output.prompt_tokens
        for start, pattern in patterns
        if not isinstance(pattern, str)
        for end in accumulate(pattern)
    }
    return sorted(end for end in ends if end > 0)


def slot_states(output: Output) -> IntArray:
    """Return the state of each slot of the answer in each forward of the target.

    A slot is filled by the last forward that had a mask token there. If no forward had one, the
    forward that committed its token filled it.

    Returns:
        Indices into `STATE_NAMES`, `[forwards, slots]`.
    """
    steps, first = target_steps(output), output.prompt_tokens
    kept = sum(step.kept for step in output.steps)
    # Tree nodes occupy slots, but not all of them end up in the text.
    ends = (step.start + step.rows for step in steps if step.pattern != "tree")
    size = max([kept, *(end - first for end in ends)])
    states = np.full((len(steps), size), STATE_ABSENT)
    filled = np.full(size, len(steps))
    for row, step in enumerate(steps):
        for run in step.holes:
            states[row, run.start - first : run.stop - first] = STATE_HOLE
            filled[run.start - first : run.stop - first] = row
    begin, row = 0, -1
    for step in output.steps:
        row += step.model == "target"
        end = begin + step.kept
        filled[begin:end] = np.minimum(filled[begin:end], row)
        begin = end
    # A slot that was neither committed nor a real token of a forward was never filled. A slot
    # that is in no later forward and was not committed was dropped.
    token, there = np.arange(size) < kept, np.arange(size) < kept
    for row in reversed(range(len(steps))):
        begin, end = (max(edge - first, 0) for edge in row_range(steps[row]))
        there[begin:end] = True
        token[begin:end] |= states[row, begin:end] != STATE_HOLE
        states[row, token & (filled == row)] = STATE_FILLED
        states[row, token & (filled < row) & there] = STATE_FULL
        states[row, :begin] = STATE_CACHED
    return states


def row_range(step: Step) -> tuple[int, int]:
    """Return the first slot of a forward, and the slot after its last."""
    return step.start, step.start + step.rows
