"""How the rows of a pass become items of work for a kernel, in numbers that go to the device.

Shapes: T rows, n items, m rows whose items must be merged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from outpace.attention.batch import Span
from outpace.models.config import Sight

LOG = logging.getLogger(__name__)

Numbers = NDArray[np.int64]

LEAST = 128
"""Slots below which an item is too short to be worth its launch."""

NO_ITEM, NO_MERGE = (0, 0, 0, 0, 0, 0, 0, -1), (0, 0, 0, 0)
"""What fills up the work of a pass, and does nothing."""

NO_PAGES = 1024
"""Length of the page tables of a pass at least, where they are filled up."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How work is cut.

    Attributes:
        rows: most rows of a tile.
        step: slots that an item looks at in one go, a multiple of the page.
        page: slots of a page.
        programs: how many items times key heads keep the device busy.
        kv_heads: key heads, each of which has all items.
    """

    rows: int
    step: int
    page: int
    programs: int
    kv_heads: int


@dataclass(slots=True)
class Tiles:
    """Neighbouring rows of one sequence, which look at their slots together; each `i64[tiles]`.

    Attributes:
        first, count: their rows in the batch.
        table: where the sequence's page table begins among all tables.
        begin, end: slots that some of the rows see; `begin` is rounded down to a step.
        clear, unclear: between these, whole steps that all of the rows see.
    """

    first: Numbers
    count: Numbers
    table: Numbers
    begin: Numbers
    clear: Numbers
    unclear: Numbers
    end: Numbers

    @classmethod
    def of(cls, spans: Sequence[Span], tables: Numbers, seen: Numbers, grid: Grid) -> Tiles:
        """Tiles of at most `grid.rows` rows; `tables` begin there, `seen` is what rows see."""
        counts = np.array([len(span) for span in spans])
        each = -(-counts // grid.rows)
        behind = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        counts, begins = np.repeat(counts, each), np.array([span.rows.start for span in spans])
        first = np.repeat(begins, each) + behind * grid.rows
        low, stop, step = seen[0], seen[1], grid.step
        # Nobody in a tree sees what is behind its own slot.
        last = stop if len(seen) == 2 else np.maximum(stop, seen[4] + 1)
        return cls(
            first=first,
            count=np.minimum(grid.rows, counts - behind * grid.rows),
            table=np.repeat(tables, each),
            begin=np.minimum.reduceat(low, first) // step * step,
            clear=-(-np.maximum.reduceat(low, first) // step) * step,
            unclear=np.minimum.reduceat(stop, first) // step * step,
            end=np.maximum.reduceat(last, first),
        )

    def items(self, grid: Grid) -> tuple[Numbers, Numbers]:
        """Items `i64[n, 8]` of about the same length, and merges `i64[m, 4]`.

        An item has the first row, the number of rows, the page table, four slots (it looks at
        those from the first to the fourth, and masks none between the second and the third), and
        the part that it leaves for its first row, or -1 where it is all of its tile.
        """
        seen = self.end - self.begin
        share = -(-int(seen.sum()) * grid.kv_heads // grid.programs)
        length = -(-max(share, LEAST) // grid.step) * grid.step
        pieces = np.maximum(-(-seen // length), 1)
        tile = np.repeat(np.arange(len(pieces)), pieces)
        number = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = self.begin[tile] + number * length
        end = np.minimum(begin + length, self.end[tile])
        clear = np.clip(self.clear[tile], begin, end)
        unclear = np.clip(self.unclear[tile], clear, end)
        part = np.where(pieces[tile] > 1, np.arange(len(tile)) * grid.rows, -1)
        columns = (self.first[tile], self.count[tile], self.table[tile], begin, clear, unclear, end)
        return np.stack((*columns, part), 1), self.merges(pieces, grid)

    def merges(self, pieces: Numbers, grid: Grid) -> Numbers:
        """For each row of a tile in several pieces: the row, its first part, their step, count."""
        several = np.flatnonzero(pieces > 1)
        tile = np.repeat(several, self.count[several])
        starts = np.cumsum(self.count[several]) - self.count[several]
        behind = np.arange(len(tile)) - np.repeat(starts, self.count[several])
        part = (np.cumsum(pieces) - pieces)[tile] * grid.rows + behind
        step = np.full_like(part, grid.rows)
        return np.stack((self.first[tile] + behind, part, step, pieces[tile]), 1)


def tables(spans: Sequence[Span], page: int) -> tuple[Numbers, Numbers]:
    """Physical pages of all sequences, as far as they are seen, and where each one's begin."""
    pages = [pages_of(span, page) for span in spans]
    counts = np.array(list(map(len, pages)))
    return np.concatenate(pages), np.cumsum(counts) - counts


def pages_of(span: Span, page: int) -> Numbers:
    """Physical pages of the slots that a sequence's rows see."""
    window = span.pages.window(span.seen)
    if isinstance(window, slice):
        return np.arange(window.start // page, -(-window.stop // page))
    return window[::page] // page


def seen_by(spans: Sequence[Span], sight: Sight) -> Numbers:
    """What each row sees in some layer: its bounds `i64[2, T]`, or `i64[5, T]` with trees."""
    return (in_trees if any(span.tree for span in spans) else bounds)(spans, sight)


def bounds(spans: Sequence[Span], sight: Sight) -> Numbers:
    """First slot that each row sees in some layer, and first that it does not, `i64[2, T]`."""
    own = np.concatenate([np.arange(s.start, s.start + len(s)) for s in spans])
    stops = np.concatenate(
        [
            np.arange(s.start + 1, s.start + len(s) + 1) if s.stops is None else np.array(s.stops)
            for s in spans
        ]
    )
    if sight.causal:
        stops = np.minimum(stops, own + 1)
    low = np.zeros_like(own) if sight.window is None else np.maximum(own - sight.window + 1, 0)
    return np.stack((low, stops))


def in_trees(spans: Sequence[Span], sight: Sight) -> Numbers:
    """Bounds of rows, and what they see behind a trunk: `i64[5, T]`.

    First slot seen, first not seen, trunk, a bit for each slot behind it, and the row's own slot,
    which it sees. A window is counted along what a row sees, which is its text.
    """
    found = np.zeros((5, spans[-1].rows.stop), dtype=np.int64)
    found[:2] = bounds(spans, sight)
    found[4] = np.concatenate([np.arange(s.start, s.start + len(s)) for s in spans])
    for span in (span for span in spans if span.tree is not None):
        assert span.tree is not None
        trunk, bits = span.tree.trunk, span.tree.bits
        rows = slice(span.rows.stop - len(bits), span.rows.stop)
        if sight.window is not None:
            left = [sight.window - 1 - own.bit_count() for own in bits]
            found[0, rows] = np.maximum(trunk - np.maximum(left, 0), 0)
            bits = tuple(latest(own, sight.window - 1) for own in bits)
        found[1, rows], found[2, rows], found[3, rows] = trunk, trunk, bits
    return found


def latest(bits: int, count: int) -> int:
    """The highest bits of a number that are set, at most so many."""
    for _ in range(max(bits.bit_count() - count, 0)):
        bits &= bits - 1
    return bits


def power(count: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (count - 1).bit_length()


def filled(rows: Numbers, nothing: Sequence[int]) -> Numbers:
    """Rows of numbers, if there are any, and others behind them up to a power of two."""
    count = power(len(rows)) - len(rows) if len(rows) else 0
    return np.concatenate((rows, np.tile(np.array(nothing, dtype=np.int64), (count, 1))))


def filled_pages(pages: Numbers) -> Numbers:
    """Page tables and noughts behind them, up to a power of two."""
    return np.pad(pages, (0, max(NO_PAGES, power(len(pages))) - len(pages)))


def unknown(kind: type, given: Sequence[object], known: set[str]) -> str:
    """Name of a field that is set in one of these and not `known` to a kernel; else nothing."""
    for field in (field for field in fields(kind) if field.name not in known):
        if any(getattr(each, field.name) is not field.default for each in given):
            return field.name
    return ""


def tells(news: str, told: set[str]) -> bool:
    """Whether there is what a back end does not know; the log says once that `dense` attends."""
    if news and news not in told:
        LOG.warning("attention: dense for forwards with %s, unknown to the kernel", news)
        told.add(news)
    return bool(news)
