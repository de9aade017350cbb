"""Attention for training: each row sees at most two ranges of keys on one axis of packed rows.

Shapes: T rows, H query heads, K key heads, D head size. `ranges` is `i32[T, 2, 2]`, half-open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.dense import sink_attention

RowRange = tuple[int, int]
CPU_DEVICE = torch.device("cpu")


def causal_ranges(length: int) -> Tensor:
    """Return the ranges of one document in which a row sees itself and the rows before it."""
    ranges = torch.zeros(length, 2, 2, dtype=torch.int32)
    ranges[:, 0, 1] = torch.arange(1, length + 1)
    return ranges


def full_ranges(length: int) -> Tensor:
    """Return the ranges of one document in which all rows see one another."""
    ranges = torch.zeros(length, 2, 2, dtype=torch.int32)
    ranges[:, 0, 1] = length
    return ranges


def grouped_ranges(lengths: Sequence[int]) -> Tensor:
    """Return the ranges of one document in which a row sees its own group and all earlier rows."""
    sizes = torch.tensor(lengths)
    ranges = full_ranges(int(sizes.sum()))
    ranges[:, 0, 1] = sizes.cumsum(0).repeat_interleave(sizes)
    return ranges


def document_ranges(ranges: Tensor) -> Tensor:
    """Return ranges of the same documents in which a row sees all of its document."""
    spans = torch.tensor(find_documents(ranges), dtype=torch.int32)
    unseen = torch.zeros_like(spans)
    return torch.stack((spans, unseen), 1).repeat_interleave(spans[:, 1] - spans[:, 0], 0)


def dense_mask(ranges: Tensor, keys: int) -> Tensor:
    """Return the mask `bool[T, keys]` of the ranges; True where a row sees a key."""
    return visible_keys(ranges, torch.arange(keys, device=ranges.device))


def visible_keys(ranges: Tensor, keys: Tensor) -> Tensor:
    """Return the mask `bool[T, n]` over some `keys i64[n]`; True where a row sees a key."""
    inside = (keys >= ranges[:, :, :1]) & (keys < ranges[:, :, 1:])
    return inside.any(dim=1)


def find_documents(ranges: Tensor) -> list[RowRange]:
    """Split the rows into independent documents: wherever no row sees across."""
    table = ranges.cpu().numpy()
    rows = np.arange(len(table))
    filled = table[:, :, 1] > table[:, :, 0]
    first = np.minimum(rows, np.where(filled, table[:, :, 0], len(table)).min(axis=1))
    last = np.maximum(rows, np.where(filled, table[:, :, 1], 0).max(axis=1) - 1)
    bridges = np.zeros(len(table) + 1, dtype=np.int64)
    np.add.at(bridges, first, 1)
    np.add.at(bridges, last, -1)
    ends = np.flatnonzero(np.cumsum(bridges)[:-1] == 0) + 1
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


def narrow_to_window(
    ranges: Tensor, own_keys: Tensor, *, window: int | None, causal: bool
) -> Tensor:
    """Return the ranges of a layer with an attention window.

    A row sees the last `window` keys up to its own; if `causal`, no key after its own. Keys are
    counted along both ranges of a row, as a cache would hold them.
    """
    if window is None and not causal:
        return ranges
    lows, highs = ranges.long().unbind(-1)
    sizes, offsets = (highs - lows).clamp(min=0), own_keys[:, None] - lows
    before = F.pad(sizes[:, :1], (1, 0))
    inside = (offsets >= 0) & (offsets < sizes)
    if len(blind := torch.nonzero(~inside.any(1))):
        raise ValueError(
            f"row {int(blind[0])} must see itself, because an attention window is counted from "
            "it; use ranges that include their own row, or a model without attention windows"
        )
    places = (offsets + before).where(inside, 0).sum(1, keepdim=True)
    stops = (places + 1 - before).clamp(min=0).minimum(sizes) if causal else sizes
    starts = torch.zeros_like(sizes)
    if window is not None:
        starts = (places + 1 - window - before).clamp(min=0).minimum(stops)
    return torch.stack((lows + starts, lows + stops), -1).int()


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Neighbouring documents of equal length and mask, attended in one call."""

    count: int
    length: int
    causal: bool
    mask: Tensor | None
    """`bool[length, length]`; None if full or causal."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend with the rows `q [n, H, D]` of all documents over their keys."""
        heads, shared = q.shape[1], q.shape[1] // k.shape[1]
        if shared > 1:
            k, v = (tensor.repeat_interleave(shared, dim=1) for tensor in (k, v))
        q, k, v = (
            tensor.view(self.count, -1, heads, tensor.shape[-1]).transpose(1, 2)
            for tensor in (q, k, v)
        )
        own = None if sinks is None else sinks.view(1, -1, 1, 1)
        out = sink_attention(q, k, v, self.mask, causal=self.causal, sinks=own)
        return out.transpose(1, 2).flatten(0, 1)


class TrainingAttention:
    """Attention in the precision that is fastest on the device."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with `q [T, H, D]` over `k, v [keys, K, D]` and optional `sinks [H]`."""
        kind = q.device.type
        if kind == "cpu" and torch.is_autocast_enabled(kind):
            # On a CPU, attention in bfloat16 is several times slower than in float32.
            with torch.autocast(kind, enabled=False):
                return self.attend(q.float(), k.float(), v.float(), sinks)
        return self.attend(q, k, v, sinks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend; the call is the same in every layer."""
        raise NotImplementedError


class RangesAttention(TrainingAttention):
    """The `attend` of packed rows: one scaled dot-product call per batch of documents."""

    def __init__(self, ranges: Tensor, device: torch.device = CPU_DEVICE) -> None:
        """Split the rows into documents once; layers plan and move nothing."""
        self.batches = [
            merge_documents(list(run), device)
            for _, run in groupby(document_batches(ranges), key=batch_key)
        ]
        self.rows = [piece.count * piece.length for piece in self.batches]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        cut = (tensor.split(self.rows) for tensor in (q, k, v))
        return torch.cat(
            [p.attend(*qkv, sinks) for p, *qkv in zip(self.batches, *cut, strict=True)]
        )


class HullAttention(TrainingAttention):
    """The `attend` of rows over keys on a separate axis: one call per run of rows."""

    # Each run receives the keys from the first to the last that any of its rows sees, per range.
    # For runs of neighbouring blocks that is little more than what they see.

    def __init__(
        self, ranges: Tensor, runs: Sequence[int], device: torch.device = CPU_DEVICE
    ) -> None:
        """Plan the calls once for all layers; `runs` are the row counts of the calls."""
        self.runs = list(runs)
        self.hulls: list[tuple[slice, ...]] = []
        self.batches: list[DocumentBatch] = []
        for part in ranges.cpu().split(self.runs):
            bounds = zip(part[..., 0].amin(0).tolist(), part[..., 1].amax(0).tolist(), strict=True)
            self.hulls.append(tuple(slice(first, last) for first, last in bounds))
            keys = torch.cat([torch.arange(hull.start, hull.stop) for hull in self.hulls[-1]])
            mask = visible_keys(part, keys).to(device)
            self.batches.append(DocumentBatch(count=1, length=len(part), causal=False, mask=mask))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        calls = zip(q.split(self.runs), self.hulls, self.batches, strict=True)
        return torch.cat(
            [
                piece.attend(rows, concat_slices(k, hulls), concat_slices(v, hulls), sinks)
                for rows, hulls, piece in calls
            ]
        )


def concat_slices(x: Tensor, parts: Sequence[slice]) -> Tensor:
    return torch.cat([x[part] for part in parts])


def document_batches(ranges: Tensor) -> list[DocumentBatch]:
    table = ranges.cpu()
    return [build_document(table[start:stop] - start) for start, stop in find_documents(table)]


def build_document(ranges: Tensor) -> DocumentBatch:
    length, mask = len(ranges), dense_mask(ranges, len(ranges))
    if bool(mask.all()):
        return DocumentBatch(1, length, causal=False, mask=None)
    if torch.equal(mask, torch.ones_like(mask).tril()):
        return DocumentBatch(1, length, causal=True, mask=None)
    return DocumentBatch(1, length, causal=False, mask=mask)


def batch_key(piece: DocumentBatch) -> tuple[int, bool, int]:
    return piece.length, piece.causal, 0 if piece.mask is None else id(piece)


def merge_documents(run: Sequence[DocumentBatch], device: torch.device) -> DocumentBatch:
    """Merge neighbouring documents of equal key and move the mask to the device."""
    mask = run[0].mask
    return replace(run[0], count=len(run), mask=None if mask is None else mask.to(device))
