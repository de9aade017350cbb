"""Division of the rows of a pass into work items for the Triton kernel.

Shapes: T rows, n items, m rows whose items must be merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from outpace.attention.batch import RowSpan
from outpace.models.config import AttentionWindow

PlanArray = NDArray[np.int64]

MIN_ITEM_SLOTS = 128
"""Slots below which an item is too short to be worth its launch."""

EMPTY_ITEM, EMPTY_MERGE = (0, 0, 0, 0, 0, 0, 0, -1), (0, 0, 0, 0)
"""Padding entries, for which the kernel does nothing."""

MIN_PADDED_PAGES = 1024
"""Minimum length of padded page tables."""


@dataclass(frozen=True, slots=True)
class WorkGrid:
    """Parameters for dividing work.

    Attributes:
        rows: maximum rows per tile.
        step: slots that an item reads per step, a multiple of the page size.
        page: slots per page.
        programs: number of items times key/value heads that keeps the device busy.
        kv_heads: number of key/value heads; each processes all items.
    """

    rows: int
    step: int
    page: int
    programs: int
    kv_heads: int


@dataclass(slots=True)
class RowTiles:
    """Neighbouring rows of one sequence that read their slots together; each array is `i64[tiles]`.

    Attributes:
        first: first row in the batch.
        count: number of rows.
        table: start of the sequence's page table among all tables.
        begin: first slot that any of the rows sees, rounded down to a step.
        full_begin: start of the whole steps that all of the rows see.
        full_end: end of the whole steps that all of the rows see.
        end: end of the slots that any of the rows sees.
    """

    first: PlanArray
    count: PlanArray
    table: PlanArray
    begin: PlanArray
    full_begin: PlanArray
    full_end: PlanArray
    end: PlanArray

    @classmethod
    def from_spans(
        cls, spans: Sequence[RowSpan], tables: PlanArray, seen: PlanArray, grid: WorkGrid
    ) -> RowTiles:
        """Create tiles of at most `grid.rows` rows.

        Args:
            spans: rows of all sequences.
            tables: start of the page table of each sequence.
            seen: visible bounds of each row, from `row_bounds`.
            grid: parameters for dividing work.
        """
        counts = np.array([len(span) for span in spans])
        each = -(-counts // grid.rows)
        offset = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        counts, begins = np.repeat(counts, each), np.array([span.rows.start for span in spans])
        first = np.repeat(begins, each) + offset * grid.rows
        low, stop, step = seen[0], seen[1], grid.step
        # A row of a tree sees no slot after its last one.
        last = stop if len(seen) == 2 else np.maximum(stop, seen[4] + 1)
        return cls(
            first=first,
            count=np.minimum(grid.rows, counts - offset * grid.rows),
            table=np.repeat(tables, each),
            begin=np.minimum.reduceat(low, first) // step * step,
            full_begin=-(-np.maximum.reduceat(low, first) // step) * step,
            full_end=np.minimum.reduceat(stop, first) // step * step,
            end=np.maximum.reduceat(last, first),
        )

    def work_items(self, grid: WorkGrid) -> tuple[PlanArray, PlanArray]:
        """Return items `i64[n, 8]` of about equal length, and merges `i64[m, 4]`.

        The columns of an item are its first row, number of rows, page table, four slots and partial
        result. It reads from the first to the fourth slot and applies no mask between the second
        and the third. The partial result is that of its first row, or -1 if the item covers its
        whole tile.
        """
        seen = self.end - self.begin
        share = -(-int(seen.sum()) * grid.kv_heads // grid.programs)
        length = -(-max(share, MIN_ITEM_SLOTS) // grid.step) * grid.step
        pieces = np.maximum(-(-seen // length), 1)
        tile = np.repeat(np.arange(len(pieces)), pieces)
        number = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = self.begin[tile] + number * length
        end = np.minimum(begin + length, self.end[tile])
        full_begin = np.clip(self.full_begin[tile], begin, end)
        full_end = np.clip(self.full_end[tile], full_begin, end)
        part = np.where(pieces[tile] > 1, np.arange(len(tile)) * grid.rows, -1)
        columns = (
            self.first[tile],
            self.count[tile],
            self.table[tile],
            begin,
            full_begin,
            full_end,
            end,
        )
        return np.stack((*columns, part), 1), self.row_merges(pieces, grid)

    def row_merges(self, pieces: PlanArray, grid: WorkGrid) -> PlanArray:
        """Return row, first partial result, stride and count per row of several items."""
        several = np.flatnonzero(pieces > 1)
        tile = np.repeat(several, self.count[several])
        starts = np.cumsum(self.count[several]) - self.count[several]
        offset = np.arange(len(tile)) - np.repeat(starts, self.count[several])
        part = (np.cumsum(pieces) - pieces)[tile] * grid.rows + offset
        step = np.full_like(part, grid.rows)
        return np.stack((self.first[tile] + offset, part, step, pieces[tile]), 1)


def page_tables(spans: Sequence[RowSpan], page: int) -> tuple[PlanArray, PlanArray]:
    """Return the visible physical pages of all sequences, and the start of each sequence."""
    pages = [visible_pages(span, page) for span in spans]
    counts = np.array(list(map(len, pages)))
    return np.concatenate(pages), np.cumsum(counts) - counts


def visible_pages(span: RowSpan, page: int) -> PlanArray:
    """Return the physical pages of the slots that a sequence's rows see."""
    window = span.pages.physical_slots(span.num_visible)
    if isinstance(window, slice):
        return np.arange(window.start // page, -(-window.stop // page))
    return window[::page] // page


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


def next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def pad_rows(rows: PlanArray, nothing: Sequence[int]) -> PlanArray:
    """Append copies of `nothing` up to a power of two; leave an empty array empty."""
    count = next_power_of_two(len(rows)) - len(rows) if len(rows) else 0
    return np.concatenate((rows, np.tile(np.array(nothing, dtype=np.int64), (count, 1))))


def pad_pages(pages: PlanArray) -> PlanArray:
    """Pad page tables with zeros up to a power of two."""
    return np.pad(pages, (0, max(MIN_PADDED_PAGES, next_power_of_two(len(pages))) - len(pages)))
