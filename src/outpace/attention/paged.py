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

from outpace.attention.batch import Batch, Span
from outpace.attention.dense import Dense
from outpace.attention.plan import (
    NO_ITEM,
    NO_MERGE,
    Grid,
    Numbers,
    Tiles,
    filled,
    filled_pages,
    seen_by,
    tables,
    tells,
    unknown,
)
from outpace.kernels import attend
from outpace.models.config import Sight
from outpace.models.transformer import Attend

LANES = {torch.float32: 64, torch.float16: 128, torch.bfloat16: 128}
"""Maximum rows times heads of a tile, by dtype."""

STEP = {torch.float32: 32, torch.float16: 64, torch.bfloat16: 64}
"""Slots that a work item reads per step, by dtype."""

WIDEST = 256
"""Maximum head size whose sums fit into registers next to a tile."""

WAVES = 2
"""Target number of items times key/value heads per multiprocessor."""

MERGED = 16
"""Partial results merged per step."""

interpreted = not isinstance(attend.attend, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on a CPU."""


def unfit(keys: Tensor, sights: Sequence[Sight], page: int, double: bool) -> str | None:
    """Return why the kernel cannot attend over a cache of `keys [S, K, D]`, or None if it can."""
    dtype, size = keys.dtype, keys.shape[-1]
    if dtype not in LANES:
        return f"it supports float32, float16 and bfloat16, got {dtype}"
    if double:
        return "int8 matrices require attention in double precision"
    if size > WIDEST:
        return f"the head size must be at most {WIDEST}, got {size}"
    if STEP[dtype] % page:
        return f"steps of {STEP[dtype]} slots must be a whole number of pages, got pages of {page}"
    if field := unknown(Sight, sights, {"window", "causal"}):
        return f"it does not support the {field} of a layer's attention window"
    return None


class Paged:
    """Plan the work of a pass as arrays on the device and run it layer by layer.

    Args:
        dense: holds the cache, and attends where a forward uses what the kernel does not
            support.
        page: slots per page.
        processors: number of multiprocessors.
        pad_work: whether to pad work to a power of two, so that passes of similar size have
            equal shapes.
    """

    def __init__(self, dense: Dense, *, page: int, processors: int, filled: bool = False) -> None:
        self.dense, self.page, self.processors, self.filled = dense, page, processors, filled
        self.keys, self.values, self.sights = dense.keys, dense.values, dense.sights
        _, self.kv_heads, self.size = dense.keys[0].shape
        self.heads = self.kv_heads * dense.sharing
        self.kinds = list(dict.fromkeys(self.sights))
        self.told: set[str] = set()

    def grid(self, spans: Sequence[Span]) -> Grid:
        """Return the grid for tiles as large as the longest forward needs."""
        group, dtype = self.heads // self.kv_heads, self.keys[0].dtype
        wanted = triton.next_power_of_2(max(map(len, spans)) * group)
        lanes = max(16, triton.next_power_of_2(group), min(wanted, LANES[dtype]))
        programs = WAVES * self.processors
        return Grid(lanes // group, STEP[dtype], self.page, programs, self.kv_heads)

    def numbers(self, spans: Sequence[Span]) -> list[Numbers]:
        """Return page tables; then for each window the visible bounds, items and merges.

        Empty if a span uses a field that the kernel does not support; `dense` then attends, and the
        log reports it once.
        """
        field = unknown(Span, spans, {"rows", "start", "seen", "stops", "pages", "tree"})
        if tells(field, self.told):
            return []
        grid = self.grid(spans)
        pages, begins = tables(spans, self.page)
        wanted = [filled_pages(pages) if self.filled else pages]
        for layer_window in self.kinds:
            seen = seen_by(spans, layer_window)
            items, merges = Tiles.of(spans, begins, seen, grid).items(grid)
            if self.filled:
                items, merges = filled(items, NO_ITEM), filled(merges, NO_MERGE)
            wanted += [seen, items, merges]
        return [each.ravel() for each in wanted]

    def plan(self, batch: Batch) -> Attend:
        """Do the work that all layers of a pass share; return the `attend` of its layers."""
        if not batch.numbers:
            return self.dense.plan(batch)
        grid = self.grid(batch.spans)
        pages, *rest = batch.numbers
        launches = {
            layer_window: Launch.of(self, grid, pages, *rest[3 * n : 3 * n + 3])
            for n, layer_window in enumerate(self.kinds)
        }

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys.index_copy_(0, batch.write, k)
            values.index_copy_(0, batch.write, v)
            return launches[self.sights[layer]](q, keys, values, sinks)

        return attend


@dataclass(slots=True)
class Launch:
    """Kernel launches of all layers with the same attention window.

    Attributes:
        grid: how the work is divided.
        pages: concatenated page tables.
        bounds: first visible slot and visible end of each row, `i64[2 * T]`; `i64[5 * T]` with
            trees.
        items: `i64[8 * n]`, see `plan.RowTiles`.
        merges: `i64[4 * m]`, see `plan.RowTiles`.
        sums: partial results of split rows.
        tops: logarithms of the weights of these partial results.
    """

    grid: Grid
    pages: Tensor
    bounds: Tensor
    items: Tensor
    merges: Tensor
    sums: Tensor
    tops: Tensor

    @classmethod
    def of(
        cls, of: Paged, grid: Grid, pages: Tensor, bounds: Tensor, items: Tensor, merges: Tensor
    ) -> Launch:
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
            UPCAST=interpreted and q.dtype == torch.bfloat16,
            TREES=len(self.bounds) > 2 * len(q),
            num_warps=8 if lanes > 64 else 4,
        )
        if len(self.merges):
            self.merge(out, sinks, width)
        return out

    def merge(self, out: Tensor, sinks: Tensor | None, width: int) -> None:
        """Add up the partial results of rows.

        Interpreted programs are slow, so the interpreter merges all heads in one.
        """
        heads, size = out.shape[1:]
        block = triton.next_power_of_2(heads) if interpreted else 1
        attend.merge[len(self.merges) // 4, triton.cdiv(heads, block)](
            *(out, self.sums, self.tops, sinks, self.merges),
            HEADS=heads,
            BLOCK=block,
            PARTS=MERGED,
            SIZE=size,
            WIDTH=width,
        )
