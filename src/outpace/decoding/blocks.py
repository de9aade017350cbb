"""Pipelined blocks of D2F (Wang et al., 2025, section 3.3): defaults, forwards, accepted holes."""

from __future__ import annotations

from itertools import pairwise

from outpace.decoding.canvas import Canvas
from outpace.decoding.forward import FloatArray, Forward, IntArray
from outpace.decoding.order import above_threshold, top_holes
from outpace.decoding.sampling import Read

D2F_BLOCK_SIZE = 16
"""Tokens of a block."""

D2F_ADD, D2F_ACTIVATE = 0.1, 0.95
"""Filled fraction of a block at which the next one is appended, and is fully activated."""

D2F_CONFIDENCE = 0.9
"""Tokens of a higher probability are accepted."""


def select_block_holes(
    confidence: FloatArray, ranks: FloatArray, threshold: float, *, is_active: bool
) -> IntArray:
    """Return the holes of a block above the threshold, or the best one if `is_active`."""
    chosen = above_threshold(confidence, threshold)
    return chosen if len(chosen) or not is_active else top_holes(ranks)


def filled_share(canvas: Canvas, begin: int, end: int | None = None) -> float:
    """Return the filled fraction of the slots of a block; 1 before the first block."""
    if end is None:
        return 1.0
    size = end - begin
    return (size - len(canvas.holes_within(begin, end))) / size


def forward_of_holes(canvas: Canvas, edges: list[int], read: Read) -> Forward:
    """Return a forward that predicts all holes, up to the end of the last block that has any.

    It starts at the first uncached block, or at the row before the first hole, which may be the one
    that predicts it.
    """
    start = min(edges[0], canvas.prefix_length - 1)
    end = next(edge for edge in edges if edge > canvas.holes[-1])
    return Forward(
        ids=canvas.ids[start:end],
        start=start,
        pattern=block_pattern(edges, start, end),
        predict=tuple(canvas.holes),
        read=read,
    )


def block_pattern(edges: list[int], start: int, end: int) -> tuple[int, ...]:
    """Return the lengths of the blocks between two slots."""
    bounds = [start, *(edge for edge in edges if start < edge <= end)]
    return tuple(stop - begin for begin, stop in pairwise(bounds))
