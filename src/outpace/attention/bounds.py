"""What each row of a pass sees, as arrays for the kernels of attention.

Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from outpace.attention.batch import RowSpan
from outpace.models.config import AttentionWindow

PlanArray = NDArray[np.int64]


def page_tables(spans: Sequence[RowSpan], page: int) -> tuple[PlanArray, PlanArray]:
    """Return the visible physical pages of all sequences, and the start of each sequence."""
    pages = [span.pages.slots[: span.num_visible : page] // page for span in spans]
    counts = np.array(list(map(len, pages)))
    return np.concatenate(pages), np.cumsum(counts) - counts


def row_bounds(spans: Sequence[RowSpan], layer_window: AttentionWindow) -> PlanArray:
    """Return what each row sees in layers of one window: `i64[2, T]`, or `i64[5, T]` with trees."""
    return (tree_bounds if any(span.tree for span in spans) else visible_bounds)(
        spans, layer_window
    )


def visible_bounds(spans: Sequence[RowSpan], layer_window: AttentionWindow) -> PlanArray:
    """Return first visible slot and visible end of each row, `i64[2, T]`."""
    slots = [np.arange(span.start, span.start + len(span)) for span in spans]
    own = np.concatenate(slots)
    stops = np.concatenate(
        [
            rows + 1 if span.visible_ends is None else np.array(span.visible_ends)
            for span, rows in zip(spans, slots, strict=True)
        ]
    )
    if layer_window.causal:
        stops = np.minimum(stops, own + 1)
    low = (
        np.zeros_like(own)
        if layer_window.window is None
        else np.maximum(own - layer_window.window + 1, 0)
    )
    return np.stack((low, stops))


def tree_bounds(spans: Sequence[RowSpan], layer_window: AttentionWindow) -> PlanArray:
    """Return the bounds of rows with trees, `i64[5, T]`.

    These are first visible slot, visible end, root slot, ancestor mask of the slots from the root
    slot on, and one more slot that the row sees, the last one: its own, or a later one that it
    points at. An attention window is counted along the slots a row sees, because these are its
    text.
    """
    found = np.zeros((5, spans[-1].rows.stop), dtype=np.int64)
    found[:2] = visible_bounds(spans, layer_window)
    found[4] = np.concatenate([np.arange(s.start, s.start + len(s)) for s in spans])
    for span in (span for span in spans if span.tree is not None):
        assert span.tree is not None
        trunk, bits = span.tree.root_slot, span.tree.ancestor_masks
        rows = slice(span.rows.stop - len(bits), span.rows.stop)
        own_slots = found[4, rows].tolist()
        bits, found[4, rows] = zip(
            *map(split_last_slot, bits, repeat(trunk), own_slots), strict=True
        )
        if layer_window.window is not None:
            rest = [layer_window.window - 1 - own.bit_count() for own in bits]
            found[0, rows] = np.maximum(trunk - np.maximum(rest, 0), 0)
            bits = tuple(latest_bits(own, layer_window.window - 1) for own in bits)
        found[1, rows], found[2, rows], found[3, rows] = trunk, trunk, bits
    return found


def split_last_slot(bits: int, root_slot: int, own_slot: int) -> tuple[int, int]:
    """Return the slots that a tree row sees, as a mask without the last one, and that one."""
    own = own_slot - root_slot
    if bits.bit_length() <= own:
        return bits, own_slot
    seen = bits | 1 << own
    last = seen.bit_length() - 1
    return seen ^ 1 << last, root_slot + last


def latest_bits(bits: int, count: int) -> int:
    """Return a mask with only its `count` highest set bits."""
    for _ in range(max(bits.bit_count() - count, 0)):
        bits &= bits - 1
    return bits
