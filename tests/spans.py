"""Rows of sequences with scattered pages, and a pass of a back end over them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outpace.attention.batch import AttentionBatch, Backend, RowSpan
from outpace.attention.cached import stored_size, write_rows
from outpace.decoding.tree import Tree
from outpace.engine.cache import PAGE_SIZE, PageTable

TREE = Tree.from_parents(70, [-1, -1, 0, 1, 2, 2, 0, 6])
FAR = Tree(20, (1 << 40 | 5, 1 << 62 | 1 << 40, 7))
AHEAD = Tree(100, (0, 1, *[0b11111] * 3, 0, 1, 0b11))
"""Rows of slots 70 to 77, 83 to 85 and 100 to 107; the second uses the last bit of a mask.

In the third, three rows see each other."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `rows [S, K, D]` as a cache stores them; the slots of a head are contiguous."""
    slots, heads, size = rows.shape
    cached = torch.zeros(heads, slots, stored_size(size, dtype), dtype=dtype).transpose(0, 1)
    write_rows(cached, torch.arange(slots), rows)
    return cached


def scattered(count: int, size: int, seed: int) -> list[PageTable]:
    """Return tables of `size` slots with scattered pages, contiguous only in the last one."""
    each = -(-size // PAGE_SIZE)
    order = np.random.default_rng(seed).permutation((count - 1) * each).tolist()
    pages = [order[n * each : n * each + each] for n in range(count - 1)]
    pages.append(list(range((count - 1) * each, count * each)))
    return [PageTable(pages=own, size=size) for own in pages]


def spans_of(asked: Sequence[tuple[int, int, object]], size: int, seed: int = 0) -> list[RowSpan]:
    """Return spans of (start, rows, pattern).

    A pattern is "causal", "full", a visible end, lengths of blocks, or a tree.
    """
    spans, begin = [], 0
    for (start, rows, pattern), table in zip(asked, scattered(len(asked), size, seed), strict=True):
        end, tree = start + rows, None
        match pattern:
            case "causal":
                stops, seen = None, end
            case "full":
                stops, seen = [end] * rows, end
            case int():
                stops, seen = [pattern] * rows, pattern
            case Tree():
                stops, seen, tree = pattern.visible_ends(start), end, pattern
            case _:
                ends = np.cumsum(pattern) + start
                stops, seen = np.repeat(ends, pattern).tolist(), end
        spans.append(RowSpan(slice(begin, begin + rows), start, seen, stops, table, tree))
        begin += rows
    return spans


def attend(
    backend: Backend, spans: list[RowSpan], q: Tensor, layer: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Attend with queries over the cache of a back end, without new keys."""
    numbers = [torch.from_numpy(each) for each in backend.plan_arrays(spans)]
    none = torch.zeros(0, dtype=torch.int64)
    nothing = q.new_zeros(0, backend.keys[0].shape[1], q.shape[-1])
    batch = AttentionBatch(none, none, none, None, spans, plan_arrays=numbers)
    return backend.plan_pass(batch)(layer, q, nothing, nothing, sinks)
