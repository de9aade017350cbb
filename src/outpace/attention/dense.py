"""Attention of a batch over cached slots, on any device: the reference back end.

Shapes: T rows of all sequences, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(slots=True, kw_only=True)
class Segment:
    """Rows of one sequence, and what of the cache they see.

    Attributes:
        rows: their place in the batch.
        slots: physical slots of the sequence, up to the last that any row sees.
        mask: `bool[n, slots]` where rows differ in what they see, or what is added to scores;
            None where all see all.
        causal: the rows are the sequence's first and see themselves and what is before them.
    """

    rows: slice
    slots: slice | Tensor
    mask: Tensor | None = None
    causal: bool = False

    def masked(self, mask: Tensor) -> Segment:
        """The same rows under another mask."""
        return Segment(rows=self.rows, slots=self.slots, mask=mask)


@dataclass(slots=True)
class DenseAttention:
    """Stores keys and values at `write i64[T]`, then attends segment by segment.

    `keys` and `values` are a layer each of `[slots, K, D]`.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    write: Tensor
    segments: Sequence[Segment]

    def __post_init__(self) -> None:
        # Made here once, and not by PyTorch in every layer.
        dtype = self.keys[0].dtype
        self.segments = [
            segment if segment.mask is None else segment.masked(bias(segment.mask, dtype))
            for segment in self.segments
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with rows `q [T, H, D]`."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, self.write, k)
        values.index_copy_(0, self.write, v)
        if len(self.segments) == 1:
            return attention(q, keys, values, self.segments[0])
        out = torch.empty_like(q)
        for segment in self.segments:
            out[segment.rows] = attention(q[segment.rows], keys, values, segment)
        return out


def bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores where a mask is True (nothing) and False (minus infinity)."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def attention(q: Tensor, keys: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """Attention of one segment's rows `q [n, H, D]` over a layer's slots: `[n, H, D]`."""
    k = keys[None, segment.slots].transpose(1, 2)
    v = values[None, segment.slots].transpose(1, 2)
    n, heads, size = q.shape
    if n == 1:
        # The heads that share a key head become its rows, and no key is read twice.
        grouped = q.view(1, k.shape[1], -1, size)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=segment.mask)
        return out.view(1, heads, size)
    out = F.scaled_dot_product_attention(
        q[None].transpose(1, 2),
        k,
        v,
        attn_mask=segment.mask,
        is_causal=segment.causal,
        enable_gqa=heads != k.shape[1],
    )
    return out.transpose(1, 2)[0]
