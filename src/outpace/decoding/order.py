"""Which holes are filled next: functions from scores to indices of holes.

Shapes: h holes. Every order takes `f32[h]`, larger first, and returns the chosen indices in the
order of their choice.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from outpace.decoding.forward import FloatArray, IntArray, Prediction

Rank = Literal["confidence", "margin", "entropy"]
"""What holes are ranked by: a probability, a lead, or how little entropy there is."""


def ranked(scores: FloatArray) -> IntArray:
    """Indices from the largest score to the smallest; the leftmost of equals comes first."""
    return np.argsort(-scores, kind="stable")


def best(scores: FloatArray, count: int = 1) -> IntArray:
    """The `count` largest scores."""
    return ranked(scores)[:count]


def above(scores: FloatArray, threshold: float) -> IntArray:
    """All scores above a threshold; none may be."""
    return np.flatnonzero(scores > threshold)


def rank(out: Prediction, by: Rank) -> FloatArray:
    """The score that holes are ranked by, larger first."""
    score: FloatArray = getattr(out, by)
    return -score if by == "entropy" else score
