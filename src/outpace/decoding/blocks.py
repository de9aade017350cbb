"""Blocks in a pipeline, as D2F fills them (Wang et al., 2025, section 3.3)."""

from __future__ import annotations

from outpace.decoding.forward import FloatArray, IntArray
from outpace.decoding.order import above, best

SIZE = 16
"""Tokens of a block."""

ADD, ACTIVATE = 0.1, 0.95
"""Shares of a block that are filled when the next one is appended, and when that must go on."""

CONFIDENCE = 0.9
"""A token of more than this is taken."""


def taken(confidence: FloatArray, ranks: FloatArray, threshold: float, *, forced: bool) -> IntArray:
    """Holes of a block that a forward fills: the sure ones or, where it must go on, the best."""
    chosen = above(confidence, threshold)
    return chosen if len(chosen) or not forced else best(ranks)
