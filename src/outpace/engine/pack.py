"""Feeds of many sequences as the tensors of one ragged pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.attention.batch import Backend, Batch, Span
from outpace.decoding import Read
from outpace.decoding.forward import IntArray
from outpace.engine.feed import Feed


class Buffer:
    """Integers on their way to a device: memory that is made once, and one copy per pass.

    All ranges of slots, and of rows, which have a slot each, are views of the `numbers` below
    `slots`.
    """

    def __init__(self, device: torch.device, slots: int) -> None:
        self.device = device
        self.numbers = np.arange(slots)
        self.grow(0)

    def grow(self, size: int) -> None:
        """Make room for so many."""
        self.there = torch.empty(size, dtype=torch.int64, device=self.device)

    def host(self, size: int) -> Tensor:
        """Memory in which that many numbers are laid out.

        Where a GPU copies from it, it is new each time, since the copy of the last pass may still
        be on its way. PyTorch keeps pinned memory, and knows when it is free again.
        """
        if self.device.type == "cpu":
            return self.there[:size]
        return torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def moved(self, numbers: Sequence[int], by: int) -> IntArray:
        """Numbers with another added to each."""
        if isinstance(numbers, range):
            return self.numbers[numbers.start + by : numbers.stop + by]
        return np.add(numbers, by)

    def send(self, ids: list[int], *groups: Sequence[Sequence[int] | IntArray]) -> list[Tensor]:
        """Tensors `i64` of ids and of the numbers of each group, good until the next call."""
        sizes = [len(ids), *[sum(map(len, group)) for group in groups]]
        total = sum(sizes)
        if total > len(self.there):
            self.grow(2 * total)
        host = self.host(total)
        self.array = array = host.numpy()
        array[: len(ids)] = ids
        np.concatenate([part for group in groups for part in group], out=array[len(ids) :])
        there = self.there[:total]
        if self.device.type != "cpu":
            there.copy_(host, non_blocking=True)
        return list(there.split(sizes))


@dataclass(slots=True)
class ReadGroup:
    """Feeds of a pass that have one type of read, whose wanted rows follow one another.

    Attributes:
        kind: their type of read.
        members: their places among the feeds of the pass.
        reads: the read of each.
        slots: the wanted slots of each.
        keep, whole: whether a read keeps its logits, or must not be cut.
        processed: whether a processor changes logits.
    """

    kind: type[Read]
    members: list[int] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    slots: list[Sequence[int]] = field(default_factory=list)
    keep: bool = False
    whole: bool = False
    processed: bool = False


@dataclass(slots=True)
class Packed:
    """A batch, and what is read of it.

    Attributes:
        batch: the rows of all feeds.
        wanted: `i64[R]` rows whose logits are wanted, those of one read type together; None where
            these are all rows in their order.
        groups: the feeds that want logits, by type of read.
        sizes: of the runs of whole numbers that it is made of, as they lie in the buffer: ids,
            positions, slots, wanted rows, positions of context.
    """

    batch: Batch
    wanted: Tensor | None
    groups: list[ReadGroup]
    sizes: list[int]


def pack(feeds: Sequence[Feed], buffer: Buffer, backend: Backend) -> Packed:
    """Lay the rows of all feeds one behind the other, and what the back end wants to know."""
    numbers = buffer.numbers
    spans: list[Span] = []
    ids: list[int] = []
    places: list[Sequence[int] | IntArray] = []
    slots: list[IntArray] = []
    behind: list[IntArray] = []  # slots and places of context, which is written first
    before: list[IntArray] = []
    groups: dict[type[Read], ReadGroup] = {}
    context: list[Tensor] = []
    features: list[Tensor] = []
    in_order = True
    for index, feed in enumerate(feeds):
        spans.append(feed.span(len(ids)))
        ids += feed.ids
        own = slice(feed.start, feed.end)
        places.append(numbers[own] if feed.positions is None else feed.positions)
        slots.append(feed.table.slots[own])
        if feed.context is not None:
            own = slice(feed.first, feed.start)
            behind.append(feed.table.slots[own])
            before.append(numbers[own])
            context.append(feed.context)
        if feed.features is not None:
            features.append(feed.features)
        in_order = in_order and feed.rows == range(len(feed.ids))
        if feed.rows:
            kind = type(feed.read)
            group = groups[kind] = groups.get(kind) or ReadGroup(kind)
            group.members.append(index)
            group.reads.append(feed.read)
            group.slots.append(feed.slots)
            group.keep = group.keep or feed.read.keep
            group.whole = group.whole or feed.read.whole
            group.processed = group.processed or bool(feed.processors)
    in_order = in_order and len(groups) == 1
    rows: list[IntArray] = []
    if not in_order:
        for group in groups.values():
            for index in group.members:
                rows.append(buffer.moved(feeds[index].rows, spans[index].rows.start))
    further = [[each] for each in backend.numbers(spans)]
    parts = buffer.send(ids, places, behind + slots, rows, before, *further)
    batch = Batch(
        ids=parts[0],
        positions=parts[1],
        write=parts[2],
        context=(torch.cat(context), parts[4]) if context else None,
        spans=spans,
        features=features,
        numbers=parts[5:],
    )
    wanted, sizes = None if in_order else parts[3], list(map(len, parts[:5]))
    return Packed(batch, wanted, [*groups.values()], sizes)
