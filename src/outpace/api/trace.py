"""What became of each slot of an answer in each forward of the target, from the trace."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from outpace.api.output import Output
from outpace.decoding import Step
from outpace.decoding.forward import IntArray

ABSENT, HOLE, FILLED, FULL, KEPT = range(5)
STATES = ("not there", "hole", "filled by this forward", "filled before", "keys are kept")


def target_steps(output: Output) -> list[Step]:
    """Forwards of the target."""
    return [step for step in output.steps if step.model == "target"]


def is_scattered(output: Output) -> bool:
    """Whether rows were fed in blocks, or with filled slots between the holes."""
    return any(isinstance(step.pattern, tuple) or len(step.holes) > 1 for step in output.steps)


def block_edges(output: Output) -> list[int]:
    """Ends of blocks, as slots of the answer."""
    patterns = ((step.start, step.pattern) for step in target_steps(output))
    ends = {
        start + end - output.prompt_tokens
        for start, pattern in patterns
        if not isinstance(pattern, str)
        for end in accumulate(pattern)
    }
    return sorted(end for end in ends if end > 0)


def slot_states(output: Output) -> IntArray:
    """State of each slot of the answer in each forward of the target, `[forwards, slots]`.

    A slot is filled by the last forward that was fed a hole there, or where there never was one,
    by the forward on which its token was committed.
    """
    steps, first = target_steps(output), output.prompt_tokens
    kept = sum(step.kept for step in output.steps)
    # Nodes of a tree stand in slots, but not all of them in the text.
    ends = (step.start + step.rows for step in steps if step.pattern != "tree")
    size = max([kept, *(end - first for end in ends)])
    states = np.full((len(steps), size), ABSENT)
    filled = np.full(size, len(steps))
    for row, step in enumerate(steps):
        for run in step.holes:
            states[row, run.start - first : run.stop - first] = HOLE
            filled[run.start - first : run.stop - first] = row
    begin, row = 0, -1
    for step in output.steps:
        row += step.model == "target"
        end = begin + step.kept
        filled[begin:end] = np.minimum(filled[begin:end], row)
        begin = end
    # What was neither committed nor fed as a token was never filled; what nobody feeds any more,
    # nor committed, was dropped.
    token, there = np.arange(size) < kept, np.arange(size) < kept
    for row in reversed(range(len(steps))):
        begin, end = (max(edge - first, 0) for edge in bounds(steps[row]))
        there[begin:end] = True
        token[begin:end] |= states[row, begin:end] != HOLE
        states[row, token & (filled == row)] = FILLED
        states[row, token & (filled < row) & there] = FULL
        states[row, :begin] = KEPT
    return states


def bounds(step: Step) -> tuple[int, int]:
    """First slot that is fed, and the one behind the last."""
    return step.start, step.start + step.rows
