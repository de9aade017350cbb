"""Feeds of many sequences as the tensors of one ragged pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from outpace.attention.batch import Batch, Span
from outpace.decoding import Read
from outpace.decoding.forward import IntArray, moved
from outpace.engine.feed import Feed


LONG = 8
"""Numbers of a range from which on arithmetic is cheaper than a list of them."""


class Buffer:
    """Integers on their way to a device: memory that is made once, and one copy per pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.grow(0)

    def grow(self, size: int) -> None:
        """Make room for so many."""
        apart = self.device.type != "cpu"
        self.host = torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.array = self.host.numpy()
        self.there = torch.empty_like(self.host, device=self.device) if apart else self.host

    def send(self, *parts: IntArray) -> list[Tensor]:
        """Tensors of some arrays, good until the next call."""
        sizes = list(map(len, parts))
        total, begin = sum(sizes), 0
        if total > len(self.host):
            self.grow(2 * total)
        for part, size in zip(parts, sizes, strict=True):
            self.array[begin : begin + size] = part
            begin += size
        if self.there is not self.host:
            self.there[:total].copy_(self.host[:total])
        return list(self.there[:total].split(sizes))


@dataclass(slots=True)
class Packed:
    """A batch, and what is read of it.

    Attributes:
        batch: the rows of all feeds.
        wanted: `i64[R]` rows whose logits are wanted, those of one read type together; None where
            these are all rows in their order.
        reads: for each read type, the feeds that ask for it.
    """

    batch: Batch
    wanted: Tensor | None
    reads: list[tuple[type[Read], list[int]]]


def pack(feeds: Sequence[Feed], buffer: Buffer) -> Packed:
    """Lay the rows of all feeds one behind the other."""
    spans: list[Span] = []
    places: list[Sequence[int]] = []
    slots: list[Sequence[int]] = []
    behind: list[Sequence[int]] = []  # slots and places of context, which is written first
    before: list[Sequence[int]] = []
    groups: dict[type[Read], list[int]] = {}
    total = 0
    for index, feed in enumerate(feeds):
        spans.append(feed.span(total))
        total += len(feed.ids)
        own = range(feed.start, feed.end)
        places.append(feed.positions or own)
        slots.append(feed.table.physical(own.start, own.stop))
        if feed.context is not None:
            behind.append(feed.table.physical(feed.first, feed.start))
            before.append(range(feed.first, feed.start))
        if feed.rows:
            groups.setdefault(type(feed.read), []).append(index)
    order = [index for group in groups.values() for index in group]
    wanted = joined([moved(feeds[index].rows, spans[index].rows.start) for index in order])
    in_order = len(wanted) == total and bool((wanted == np.arange(total)).all())
    ids = joined([feed.ids for feed in feeds])
    parts = buffer.send(ids, joined(places), joined(behind + slots), wanted, joined(before))
    features = [feed.context for feed in feeds if feed.context is not None]
    batch = Batch(
        ids=parts[0],
        positions=parts[1],
        write=parts[2],
        context=(torch.cat(features), parts[4]) if features else None,
        spans=spans,
    )
    return Packed(batch, None if in_order else parts[3], list(groups.items()))


def joined(parts: Sequence[Sequence[int]]) -> IntArray:
    """Numbers one behind the other; those of long ranges without a look at each."""
    total = sum(map(len, parts))
    if total > LONG * len(parts) and all(isinstance(part, range) for part in parts):
        counts = list(map(len, parts))
        begins = [part.start for part in parts] - np.cumsum([0, *counts[:-1]])
        return np.repeat(begins, counts) + np.arange(total)
    return np.fromiter(chain.from_iterable(parts), np.int64, total)
