"""Attention over cached slots by a Triton kernel, one launch per layer for all rows of a pass.

Shapes: T rows of all sequences, H heads, K key/value heads, D head size, S cache slots; n work
items, m rows whose items are merged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from outpace.attention.batch import AttentionBatch, RowSpan
from outpace.attention.bounds import PlanArray, page_tables, row_bounds
from outpace.attention.cached import head_size, write_rows
from outpace.attention.dense import DenseAttention
from outpace.kernels import attend
from outpace.models.attention import Attend

MAX_TILE_LANES = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}
"""Maximum rows times heads of a tile, by dtype."""

STEP_SLOTS = {torch.float32: 32, torch.float16: 64, torch.bfloat16: 64}
"""Slots that a work item reads per step, by dtype."""

MAX_KERNEL_HEAD_SIZE = 256
"""Maximum head size whose sums fit into registers next to a tile."""

ITEMS_PER_PROCESSOR = 2
"""Target number of items times key/value heads per multiprocessor."""

MERGE_PARTS = 16
"""Partial results merged per step."""

MIN_ITEM_SLOTS = 128
"""Slots below which an item is too short to be worth its launch."""

MIN_PADDED_PAGES = 1024
"""Minimum length of padded page tables."""

is_interpreted = not isinstance(attend.attend, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on a CPU."""


def paged_unfit_reason(keys: Tensor, page: int, dtype: torch.dtype, double: bool) -> str | None:
    """Return why the kernel cannot attend over `keys [S, K, D]` in a `dtype`, or None if it can."""
    size = head_size(keys)
    if dtype not in MAX_TILE_LANES:
        return f"it supports float32, float16 and bfloat16, got {dtype}"
    if double:
        return "int8 matrices require attention in double precision"
    if size > MAX_KERNEL_HEAD_SIZE:
        return f"the head size must be at most {MAX_KERNEL_HEAD_SIZE}, got {size}"
    if STEP_SLOTS[dtype] % page:
        return (
            f"steps of {STEP_SLOTS[dtype]} slots must be a whole number of pages, got "
            f"pages of {page}"
        )
    return None


class WorkItems(NamedTuple):
    """Neighbouring rows of a sequence over some of its slots; `i64[n]` each.

    An item reads the slots from `begin` to `end`, without a mask from `full_begin` to `full_end`,
    since all of its rows see these. `kernels/attend.py` names the columns in this order.
    """

    first_row: PlanArray
    """First row in the batch."""
    num_rows: PlanArray
    table: PlanArray
    """Start of the sequence's page table among all tables."""
    begin: PlanArray
    full_begin: PlanArray
    full_end: PlanArray
    end: PlanArray
    part: PlanArray
    """Partial result of the first row; -1 if the item reads all slots that its rows see."""


class RowMerges(NamedTuple):
    """Rows of several items, whose partial results are added up; `i64[m]` each."""

    row: PlanArray
    first_part: PlanArray
    stride: PlanArray
    """Distance of its partial results."""
    num_parts: PlanArray


@dataclass(frozen=True, slots=True)
class WorkGrid:
    """Parameters for dividing work."""

    rows: int
    """Maximum rows of an item."""
    step: int
    """Slots that an item reads per step, a multiple of the page size."""
    page: int
    """Slots per page."""
    programs: int
    """Number of items times key/value heads that keeps the device busy."""
    kv_heads: int
    """Number of key/value heads; each processes all items."""

    def tile_rows(self, spans: Sequence[RowSpan], tables: PlanArray, seen: PlanArray) -> WorkItems:
        """Return items of at most `rows` rows, which read all slots that these see.

        Args:
            spans: Rows of all sequences.
            tables: Start of the page table of each sequence.
            seen: Visible bounds of each row, from `row_bounds`.
        """
        counts = np.array([len(span) for span in spans])
        each = -(-counts // self.rows)
        offset = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        counts, begins = np.repeat(counts, each), np.array([span.rows.start for span in spans])
        first = np.repeat(begins, each) + offset * self.rows
        low, stop, step = seen[0], seen[1], self.step
        # A row of a tree sees no slot after its last one.
        last = stop if len(seen) == 2 else np.maximum(stop, seen[4] + 1)
        return WorkItems(
            first_row=first,
            num_rows=np.minimum(self.rows, counts - offset * self.rows),
            table=np.repeat(tables, each),
            begin=np.minimum.reduceat(low, first) // step * step,
            full_begin=-(-np.maximum.reduceat(low, first) // step) * step,
            full_end=np.minimum.reduceat(stop, first) // step * step,
            end=np.maximum.reduceat(last, first),
            part=np.full_like(first, -1),
        )

    def split_tiles(self, tiles: WorkItems) -> tuple[WorkItems, RowMerges]:
        """Return items of about equal length that read the slots of `tiles`, and their merges."""
        seen = tiles.end - tiles.begin
        share = -(-int(seen.sum()) * self.kv_heads // self.programs)
        length = -(-max(share, MIN_ITEM_SLOTS) // self.step) * self.step
        pieces = np.maximum(-(-seen // length), 1)
        tile = np.repeat(np.arange(len(pieces)), pieces)
        number = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        own = WorkItems(*(column[tile] for column in tiles))
        begin = own.begin + number * length
        end = np.minimum(begin + length, own.end)
        full_begin = np.clip(own.full_begin, begin, end)
        items = own._replace(
            begin=begin,
            full_begin=full_begin,
            full_end=np.clip(own.full_end, full_begin, end),
            end=end,
            part=np.where(pieces[tile] > 1, np.arange(len(tile)) * self.rows, -1),
        )
        return items, self.merge_rows(tiles, pieces)

    def merge_rows(self, tiles: WorkItems, pieces: PlanArray) -> RowMerges:
        """Return the rows of tiles that are split into several `pieces`."""
        several = np.flatnonzero(pieces > 1)
        counts = tiles.num_rows[several]
        tile = np.repeat(several, counts)
        offset = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
        first_part = (np.cumsum(pieces) - pieces)[tile] * self.rows + offset
        return RowMerges(
            row=tiles.first_row[tile] + offset,
            first_part=first_part,
            stride=np.full_like(first_part, self.rows),
            num_parts=pieces[tile],
        )


def pack_columns(columns: Sequence[PlanArray], *, pad: bool) -> PlanArray:
    """Return columns as rows, with `pad` up to a power of two of them.

    The rows added are zeros, for which the kernel does nothing. No rows stay none.
    """
    rows = np.stack(columns, 1)
    return pad_zeros(rows, next_power_of_two(len(rows))) if pad and len(rows) else rows


def pad_pages(pages: PlanArray) -> PlanArray:
    """Pad page tables with zeros up to a power of two."""
    return pad_zeros(pages, max(MIN_PADDED_PAGES, next_power_of_two(len(pages))))


def pad_zeros(array: PlanArray, count: int) -> PlanArray:
    return np.pad(array, [(0, count - len(array)), *[(0, 0)] * (array.ndim - 1)])


def next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class PagedAttention:
    """Plan the work of a pass as arrays on the device and run it layer by layer.

    Args:
        dense: holds the cache.
        page: slots per page.
        processors: number of multiprocessors.
        pad_work: whether to pad work to a power of two, so that passes of similar size have
            equal shapes.
    """

    def __init__(
        self, dense: DenseAttention, *, page: int, processors: int, pad_work: bool = False
    ) -> None:
        self.page, self.processors, self.pad_work = page, processors, pad_work
        self.dtype = dense.dtype
        self.keys, self.values, self.attention_windows = (
            dense.keys,
            dense.values,
            dense.attention_windows,
        )
        self.kv_heads, self.size = dense.keys[0].shape[1], head_size(dense.keys[0])
        self.heads = self.kv_heads * dense.heads_per_kv_head
        self.distinct_windows = list(dict.fromkeys(self.attention_windows))

    def work_grid(self, spans: Sequence[RowSpan]) -> WorkGrid:
        """Return the grid for tiles as large as the longest forward needs."""
        group, dtype = self.heads // self.kv_heads, self.dtype
        wanted = next_power_of_two(max(map(len, spans)) * group)
        lanes = max(16, next_power_of_two(group), min(wanted, MAX_TILE_LANES[dtype]))
        programs = ITEMS_PER_PROCESSOR * self.processors
        return WorkGrid(
            rows=lanes // group,
            step=STEP_SLOTS[dtype],
            page=self.page,
            programs=programs,
            kv_heads=self.kv_heads,
        )

    @property
    def num_arrays(self) -> int:
        return 1 + 3 * len(self.distinct_windows)

    def plan_arrays(self, spans: Sequence[RowSpan]) -> list[PlanArray]:
        """Return page tables; then for each window the visible bounds, items and merges."""
        grid = self.work_grid(spans)
        pages, begins = page_tables(spans, self.page)
        wanted = [pad_pages(pages) if self.pad_work else pages]
        for layer_window in self.distinct_windows:
            seen = row_bounds(spans, layer_window)
            work = grid.split_tiles(grid.tile_rows(spans, begins, seen))
            wanted += [seen, *(pack_columns(each, pad=self.pad_work) for each in work)]
        return [each.ravel() for each in wanted]

    def plan_pass(self, batch: AttentionBatch) -> Attend:
        grid = self.work_grid(batch.spans)
        pages, *rest = batch.plan_arrays
        launches = {
            layer_window: LayerLaunch.allocate(self, grid, pages, *rest[3 * n : 3 * n + 3])
            for n, layer_window in enumerate(self.distinct_windows)
        }

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            if k.shape[1]:
                write_rows(keys, batch.write_slots, k)
                write_rows(values, batch.write_slots, v)
            return launches[self.attention_windows[layer]](q, keys, values, sinks)

        return attend


@dataclass(slots=True)
class LayerLaunch:
    """Kernel launches of all layers with the same attention window."""

    grid: WorkGrid
    """How the work is divided."""
    pages: Tensor
    """Concatenated page tables."""
    bounds: Tensor
    """First visible slot and visible end of each row, `i64[2 * T]`; `i64[5 * T]` with trees."""
    items: Tensor
    """Rows of `WorkItems`, flat."""
    merges: Tensor
    """Rows of `RowMerges`, flat."""
    sums: Tensor
    """Partial results of split rows."""
    tops: Tensor
    """Logarithms of the weights of the partial results."""

    @classmethod
    def allocate(
        cls,
        of: PagedAttention,
        grid: WorkGrid,
        pages: Tensor,
        bounds: Tensor,
        items: Tensor,
        merges: Tensor,
    ) -> LayerLaunch:
        """Allocate the partial results once, for all layers."""
        parts = len(items) // len(WorkItems._fields) * grid.rows if len(merges) else 0
        tops = torch.empty(parts, of.heads, dtype=torch.float32, device=pages.device)
        sums = tops.new_empty(parts, of.heads, of.size)
        return cls(grid, pages, bounds, items, merges, sums, tops)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend with all rows `q [T, H, D]` and optional `sinks [H]`."""
        heads, size = q.shape[1:]
        group = heads // self.grid.kv_heads
        lanes = next_power_of_two(self.grid.rows * group)
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = q.new_empty(q.shape)
        results = {"out": out, "sums": self.sums, "tops": self.tops, "sinks": sinks}
        sizes = {"SIZE": size, "WIDTH": max(16, next_power_of_two(size))}
        attend.attend[len(self.items) // len(WorkItems._fields), self.grid.kv_heads](
            q=q,
            keys=keys,
            values=values,
            **results,
            tables=self.pages,
            bounds=self.bounds,
            items=self.items,
            rows=len(q),
            scale=math.log2(math.e) / math.sqrt(size),
            q_row=q.stride(0),
            q_head=q.stride(1),
            slot_stride=keys.stride(0),
            head_stride=keys.stride(1),
            GROUP=group,
            M=lanes,
            N=self.grid.step,
            PAGE=self.grid.page,
            **sizes,
            UPCAST=is_interpreted and q.dtype == torch.bfloat16,
            TREES=len(self.bounds) > 2 * len(q),
            num_warps=8 if lanes > 64 else 4,
        )
        if len(self.merges):
            # Interpreted programs are slow, so the interpreter merges all heads in one.
            block = next_power_of_two(heads) if is_interpreted else 1
            rows = len(self.merges) // len(RowMerges._fields)
            attend.merge[rows, triton.cdiv(heads, block)](
                **results, merges=self.merges, HEADS=heads, BLOCK=block, PARTS=MERGE_PARTS, **sizes
            )
        return out
