"""Attention over cached slots by a Triton kernel, for all rows of a pass in one launch per layer.

Shapes: T rows of all sequences, H heads, K key/value heads, D head size, S slots of the cache.
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
"""Rows times heads of the largest tile, by dtype."""

STEP = {torch.float32: 32, torch.float16: 64, torch.bfloat16: 64}
"""Slots that an item looks at in one go."""

WIDEST = 256
"""Largest head size whose sums fit beside a tile."""

WAVES = 2
"""Items times key heads for each multiprocessor."""

MERGED = 16
"""Parts that are added up at a time."""

interpreted = not isinstance(attend.attend, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on a CPU."""


def unfit(keys: Tensor, sights: Sequence[Sight], page: int, double: bool) -> str | None:
    """Why the kernel cannot attend over a cache of `keys [S, K, D]`; None where it can."""
    dtype, size = keys.dtype, keys.shape[-1]
    if dtype not in LANES:
        return f"it knows float32, float16 and bfloat16, not {dtype}"
    if double:
        return "matrices of 8 bits want attention in double precision"
    if size > WIDEST:
        return f"heads of {size} are larger than {WIDEST}"
    if STEP[dtype] % page:
        return f"steps of {STEP[dtype]} slots are no whole number of pages of {page}"
    if news := unknown(Sight, sights, {"window", "causal"}):
        return f"it does not know the {news} of a layer's sight"
    return None


class Paged:
    """Plans the work of a pass as numbers on the device, and runs it layer by layer.

    `dense` has the cache, and attends where a forward says what the kernel does not know; `page` is
    the number of slots that lie side by side, and `processors` how many multiprocessors there are.
    `filled` work is a power of two, so that passes which are about as large look alike.
    """

    def __init__(self, dense: Dense, *, page: int, processors: int, filled: bool = False) -> None:
        self.dense, self.page, self.processors, self.filled = dense, page, processors, filled
        self.keys, self.values, self.sights = dense.keys, dense.values, dense.sights
        _, self.kv_heads, self.size = dense.keys[0].shape
        self.heads = self.kv_heads * dense.sharing
        self.kinds = list(dict.fromkeys(self.sights))
        self.told: set[str] = set()

    def grid(self, spans: Sequence[Span]) -> Grid:
        """Tiles as large as the longest forward wants them."""
        group, dtype = self.heads // self.kv_heads, self.keys[0].dtype
        wanted = triton.next_power_of_2(max(map(len, spans)) * group)
        lanes = max(16, triton.next_power_of_2(group), min(wanted, LANES[dtype]))
        programs = WAVES * self.processors
        return Grid(lanes // group, STEP[dtype], self.page, programs, self.kv_heads)

    def numbers(self, spans: Sequence[Span]) -> list[Numbers]:
        """Page tables; then for each kind of layer what rows see, the items, the merges.

        Nothing where a span says what the kernel does not know, so that `dense` attends; a line of
        the log tells it once.
        """
        news = unknown(Span, spans, {"rows", "start", "seen", "stops", "pages", "tree"})
        if tells(news, self.told):
            return []
        grid = self.grid(spans)
        pages, begins = tables(spans, self.page)
        wanted = [filled_pages(pages) if self.filled else pages]
        for sight in self.kinds:
            seen = seen_by(spans, sight)
            items, merges = Tiles.of(spans, begins, seen, grid).items(grid)
            if self.filled:
                items, merges = filled(items, NO_ITEM), filled(merges, NO_MERGE)
            wanted += [seen, items, merges]
        return [each.ravel() for each in wanted]

    def plan(self, batch: Batch) -> Attend:
        """What is the same in every layer is done here, once per pass."""
        if not batch.numbers:
            return self.dense.plan(batch)
        grid = self.grid(batch.spans)
        pages, *rest = batch.numbers
        launches = {
            sight: Launch.of(self, grid, pages, *rest[3 * n : 3 * n + 3])
            for n, sight in enumerate(self.kinds)
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
    """The work of all layers of one kind.

    Attributes:
        grid: how it is cut.
        pages: page tables, one behind the other.
        bounds: `i64[2 * T]` lowest slot and stop of each row; `i64[5 * T]` with trees.
        items, merges: `i64[8 * n]` and `i64[4 * m]`, see `plan.Tiles`.
        sums, tops: parts of what is split, and the logarithms of their weights.
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
        """Room for parts is made once, for all layers."""
        parts = len(items) // 8 * grid.rows if len(merges) else 0
        tops = torch.empty(parts, of.heads, dtype=torch.float32, device=pages.device)
        sums = tops.new_empty(parts, of.heads, of.size)
        return cls(grid, pages, bounds, items, merges, sums, tops)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend with all rows `q [T, H, D]`, beside `sinks [H]` if there are any."""
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
        """Add up the parts of rows; a program of the interpreter is dear, so it has few."""
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
