"""Pipelined blocks of D2F (Wang et al., 2025, section 3.3): defaults and the choice of holes."""

from __future__ import annotations

from outpace.decoding.forward import FloatArray, IntArray
from outpace.decoding.order import above, best

SIZE = 16
"""Tokens of a block."""

ADD, ACTIVATE = 0.1, 0.95
"""Filled share of a block at which the next one is appended, and is fully activated."""

CONFIDENCE = 0.9
"""Tokens of a higher probability are accepted."""


def taken(confidence: FloatArray, ranks: FloatArray, threshold: float, *, forced: bool) -> IntArray:
    """Return the holes of a block above the threshold, or the best one if `is_active`."""
    chosen = above(confidence, threshold)
    return chosen if len(chosen) or not forced else best(ranks)
