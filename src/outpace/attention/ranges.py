"""Attention for training: each row sees at most two ranges of keys on one flat axis of packed rows.

Shapes: T rows, H query heads, K key heads, D head size. `ranges` is i32[T, 2, 2]: half-open.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Span = tuple[int, int]


def causal(length: int) -> Tensor:
    """Ranges of one document whose row i sees the rows up to itself."""
    ranges = torch.zeros(length, 2, 2, dtype=torch.int32)
    ranges[:, 0, 1] = torch.arange(1, length + 1)
    return ranges


def full(length: int) -> Tensor:
    """Ranges of one document whose rows all see one another."""
    ranges = torch.zeros(length, 2, 2, dtype=torch.int32)
    ranges[:, 0, 1] = length
    return ranges


def groups(lengths: Sequence[int]) -> Tensor:
    """Ranges of one document in groups; a row sees its own group and what lies before it."""
    sizes = torch.tensor(lengths)
    ranges = full(int(sizes.sum()))
    ranges[:, 0, 1] = sizes.cumsum(0).repeat_interleave(sizes)
    return ranges


def whole(ranges: Tensor) -> Tensor:
    """Ranges of the same documents whose rows see all of their document."""
    spans = torch.tensor(documents(ranges), dtype=torch.int32)
    unseen = torch.zeros_like(spans)
    return torch.stack((spans, unseen), 1).repeat_interleave(spans[:, 1] - spans[:, 0], 0)


def dense(ranges: Tensor, keys: int) -> Tensor:
    """The boolean mask [T, keys] that the ranges mean; True where a row sees a key."""
    return seen(ranges, torch.arange(keys, device=ranges.device))


def seen(ranges: Tensor, keys: Tensor) -> Tensor:
    """The boolean mask [T, n] over some keys i64[n]; True where a row sees one."""
    inside = (keys >= ranges[:, :, :1]) & (keys < ranges[:, :, 1:])
    return inside.any(dim=1)


def documents(ranges: Tensor) -> list[Span]:
    """The independent pieces of the rows: cut wherever no row sees across."""
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


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring documents of one length and kind, attended in one call."""

    count: int
    length: int
    causal: bool
    mask: Tensor | None  # bool[length, length]; None where full or causal


class Attention:
    """Attention in the precision that suits the device."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend q [T, H, D] over k, v [keys, K, D]."""
        kind = q.device.type
        if kind == "cpu" and torch.is_autocast_enabled(kind):
            # The CPU's attention is several times slower in bfloat16 than in float32.
            with torch.autocast(kind, enabled=False):
                return self.attend(q.float(), k.float(), v.float())
        return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same for every layer."""
        raise NotImplementedError


class RangesAttention(Attention):
    """The `attend` of a packed batch: one scaled-dot-product call a piece, without padding."""

    def __init__(self, ranges: Tensor) -> None:
        """Cut the rows into pieces once; every layer uses them."""
        self.pieces = [
            merged
            for _, run in groupby(_pieces(ranges), key=_kind)
            for merged in [_merge(list(run))]
        ]
        self.rows = [piece.count * piece.length for piece in self.pieces]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend q [T, H, D] over k, v [T, K, D] of the same rows."""
        cut = (tensor.split(self.rows) for tensor in (q, k, v))
        return torch.cat([_attend(p, *qkv) for p, *qkv in zip(self.pieces, *cut, strict=True)])


class HullAttention(Attention):
    """The `attend` of rows over keys on an axis of their own: one call a run of rows.

    A run is given the keys from the first to the last that one of its rows sees, of either range,
    and no others: with runs of neighbouring blocks that is little more than what they see.
    """

    def __init__(self, ranges: Tensor, runs: Sequence[int]) -> None:
        """Plan the calls once; every layer uses them. `runs` are the rows of each."""
        self.runs = list(runs)
        self.hulls: list[tuple[slice, ...]] = []
        self.masks: list[Tensor] = []
        for part in ranges.cpu().split(self.runs):
            bounds = zip(part[..., 0].amin(0).tolist(), part[..., 1].amax(0).tolist(), strict=True)
            self.hulls.append(tuple(slice(first, last) for first, last in bounds))
            keys = torch.cat([torch.arange(hull.start, hull.stop) for hull in self.hulls[-1]])
            self.masks.append(seen(part, keys))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend q [T, H, D] over k, v [keys, K, D]."""
        return torch.cat(
            [
                _attend(Piece(1, len(rows), causal=False, mask=mask), rows, *keys)
                for rows, hulls, mask in zip(
                    q.split(self.runs), self.hulls, self.masks, strict=True
                )
                for keys in [[torch.cat([x[hull] for hull in hulls]) for x in (k, v)]]
            ]
        )


def _pieces(ranges: Tensor) -> list[Piece]:
    table = ranges.cpu()
    return [_piece(table[start:stop] - start) for start, stop in documents(table)]


def _piece(ranges: Tensor) -> Piece:
    length = len(ranges)
    mask = dense(ranges, length)
    if bool(mask.all()):
        return Piece(1, length, causal=False, mask=None)
    if torch.equal(mask, torch.ones_like(mask).tril()):
        return Piece(1, length, causal=True, mask=None)
    return Piece(1, length, causal=False, mask=mask)


def _kind(piece: Piece) -> tuple[int, bool, int]:
    return piece.length, piece.causal, 0 if piece.mask is None else id(piece)


def _merge(run: Sequence[Piece]) -> Piece:
    first = run[0]
    return Piece(len(run), first.length, first.causal, first.mask)


def _attend(piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    q, k, v = (
        tensor.view(piece.count, -1, heads, tensor.shape[-1]).transpose(1, 2)
        for tensor in (q, k, v)
    )
    mask = None if piece.mask is None else piece.mask.to(q.device)  # planned on the host
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=piece.causal)
    return out.transpose(1, 2).flatten(0, 1)
