"""Attention over cached slots by a Triton kernel, one launch per layer for all rows of a pass.

Shapes: T rows of all sequences, H heads, K key/value heads, D head size, S cache slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from outpace.attention.batch import AttentionBatch, RowSpan
from outpace.attention.dense import DenseAttention
from outpace.attention.plan import (
    EMPTY_ITEM,
    EMPTY_MERGE,
    PlanArray,
    RowTiles,
    WorkGrid,
    pad_pages,
    pad_rows,
    page_tables,
    row_bounds,
)
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

is_interpreted = not isinstance(attend.attend, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on a CPU."""


def paged_unfit_reason(keys: Tensor, page: int, double: bool) -> str | None:
    """Return why the kernel cannot attend over a cache of `keys [S, K, D]`, or None if it can."""
    dtype, size = keys.dtype, keys.shape[-1]
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
        self.keys, self.values, self.attention_windows = (
            dense.keys,
            dense.values,
            dense.attention_windows,
        )
        _, self.kv_heads, self.size = dense.keys[0].shape
        self.heads = self.kv_heads * dense.heads_per_kv_head
        self.distinct_windows = list(dict.fromkeys(self.attention_windows))

    def work_grid(self, spans: Sequence[RowSpan]) -> WorkGrid:
        """Return the grid for tiles as large as the longest forward needs."""
        group, dtype = self.heads // self.kv_heads, self.keys[0].dtype
        wanted = triton.next_power_of_2(max(map(len, spans)) * group)
        lanes = max(16, triton.next_power_of_2(group), min(wanted, MAX_TILE_LANES[dtype]))
        programs = ITEMS_PER_PROCESSOR * self.processors
        return WorkGrid(lanes // group, STEP_SLOTS[dtype], self.page, programs, self.kv_heads)

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
            items, merges = RowTiles.from_spans(spans, begins, seen, grid).work_items(grid)
            if self.pad_work:
                items, merges = pad_rows(items, EMPTY_ITEM), pad_rows(merges, EMPTY_MERGE)
            wanted += [seen, items, merges]
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
                keys.index_copy_(0, batch.write_slots, k)
                values.index_copy_(0, batch.write_slots, v)
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
    """`i64[8 * n]`, see `plan.RowTiles`."""
    merges: Tensor
    """`i64[4 * m]`, see `plan.RowTiles`."""
    sums: Tensor
    """Partial results of split rows."""
    tops: Tensor
    """Logarithms of the weights of these partial results."""

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
        parts = len(items) // 8 * grid.rows if len(merges) else 0
        tops = torch.empty(parts, of.heads, dtype=torch.float32, device=pages.device)
        sums = tops.new_empty(parts, of.heads, of.size)
        return cls(grid, pages, bounds, items, merges, sums, tops)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend with all rows `q [T, H, D]` and optional `sinks [H]`."""
        heads, size = q.shape[1:]
        group = heads // self.grid.kv_heads
        lanes = triton.next_power_of_2(self.grid.rows * group)
        width = max(16, triton.next_power_of_2(size))
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = q.new_empty(q.shape)
        attend.attend[len(self.items) // 8, self.grid.kv_heads](
            *(q, keys, values, out, self.sums, self.tops, sinks),
            *(self.pages, self.bounds, self.items),
            len(q),
            math.log2(math.e) / math.sqrt(size),
            *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1)),
            GROUP=group,
            M=lanes,
            N=self.grid.step,
            PAGE=self.grid.page,
            SIZE=size,
            WIDTH=width,
            UPCAST=is_interpreted and q.dtype == torch.bfloat16,
            TREES=len(self.bounds) > 2 * len(q),
            num_warps=8 if lanes > 64 else 4,
        )
        if len(self.merges):
            self.merge_parts(out, sinks, width)
        return out

    def merge_parts(self, out: Tensor, sinks: Tensor | None, width: int) -> None:
        """Add up the partial results of rows.

        Interpreted programs are slow, so the interpreter merges all heads in one.
        """
        heads, size = out.shape[1:]
        block = triton.next_power_of_2(heads) if is_interpreted else 1
        attend.merge[len(self.merges) // 4, triton.cdiv(heads, block)](
            *(out, self.sums, self.tops, sinks, self.merges),
            HEADS=heads,
            BLOCK=block,
            PARTS=MERGE_PARTS,
            SIZE=size,
            WIDTH=width,
        )
