"""Packing: the scheduled forwards of many sequences as the tensors of one ragged pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outpace.attention.batch import AttentionBatch, Backend, RowSpan
from outpace.decoding import Read
from outpace.decoding.forward import IntArray
from outpace.engine.scheduled_forward import ScheduledForward


class TransferBuffer:
    """Integers on their way to a device: memory allocated once, and one copy per pass.

    All ranges of slots and rows are views of `numbers`, the integers below `slots`.
    """

    def __init__(self, device: torch.device, slots: int) -> None:
        self.device = device
        self.numbers = np.arange(slots)
        self.grow(0)

    def grow(self, size: int) -> None:
        """Make room for `size` integers."""
        self.device_memory = torch.empty(size, dtype=torch.int64, device=self.device)

    def host_memory(self, size: int) -> Tensor:
        """Return host memory for `size` integers.

        For a GPU it is allocated for each pass, since the copy of the last pass may still be
        running. PyTorch caches pinned memory and reuses it when the copy has finished.
        """
        if self.device.type == "cpu":
            return self.device_memory[:size]
        return torch.empty(size, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def shift_numbers(self, numbers: Sequence[int], by: int) -> IntArray:
        """Add `by` to each number."""
        if isinstance(numbers, range):
            return self.numbers[numbers.start + by : numbers.stop + by]
        return np.add(numbers, by)

    def copy_to_device(
        self, ids: list[int], *groups: Sequence[Sequence[int] | IntArray]
    ) -> list[Tensor]:
        """Return `i64` tensors of ids and of each group's numbers, valid until the next call."""
        sizes = [len(ids), *[sum(map(len, group)) for group in groups]]
        total = sum(sizes)
        if total > len(self.device_memory):
            self.grow(2 * total)
        host = self.host_memory(total)
        self.array = array = host.numpy()
        array[: len(ids)] = ids
        np.concatenate([part for group in groups for part in group], out=array[len(ids) :])
        copied = self.device_memory[:total]
        if self.device.type != "cpu":
            copied.copy_(host, non_blocking=True)
        return list(copied.split(sizes))


@dataclass(slots=True)
class ReadGroup:
    """Forwards of a pass that have one type of read; their wanted rows are consecutive.

    Attributes:
        kind: their type of read.
        members: their indices among the forwards of the pass.
        reads: the read of each.
        slots: the wanted slots of each.
        keep: whether a read keeps its logits.
        needs_all_rows: whether a read must not be split.
        has_processors: whether a processor changes logits.
        top_logprobs: number of most probable tokens that are wanted of a row.
    """

    kind: type[Read]
    members: list[int] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    slots: list[Sequence[int]] = field(default_factory=list)
    keep: bool = False
    needs_all_rows: bool = False
    has_processors: bool = False
    top_logprobs: int = 0


@dataclass(slots=True)
class PackedPass:
    """A batch and its reads.

    Attributes:
        batch: rows of all forwards.
        wanted: `i64[R]` rows whose logits are wanted, grouped by read type; None for all rows in
            order.
        groups: the forwards with wanted logits, by type of read.
        sizes: lengths of the integer arrays in the buffer: ids, positions, slots, wanted rows,
            positions of context.
    """

    batch: AttentionBatch
    wanted: Tensor | None
    groups: list[ReadGroup]
    sizes: list[int]


def pack_pass(
    forwards: Sequence[ScheduledForward], buffer: TransferBuffer, backend: Backend
) -> PackedPass:
    """Concatenate the rows of all forwards, and add the arrays of the attention back end."""
    numbers = buffer.numbers
    spans: list[RowSpan] = []
    ids: list[int] = []
    positions: list[Sequence[int] | IntArray] = []
    slots: list[IntArray] = []
    context_slots: list[IntArray] = []  # context is written first
    context_positions: list[IntArray] = []
    groups: dict[type[Read], ReadGroup] = {}
    context: list[Tensor] = []
    features: list[Tensor] = []
    in_order = True
    for index, forward in enumerate(forwards):
        spans.append(forward.make_span(len(ids)))
        ids += forward.ids
        span_slots = slice(forward.start, forward.end)
        positions.append(numbers[span_slots] if forward.positions is None else forward.positions)
        slots.append(forward.table.slots[span_slots])
        if forward.context is not None:
            span_slots = slice(forward.first_slot, forward.start)
            context_slots.append(forward.table.slots[span_slots])
            context_positions.append(numbers[span_slots])
            context.append(forward.context)
        if forward.features is not None:
            features.append(forward.features)
        in_order = in_order and forward.rows == range(len(forward.ids))
        if forward.rows:
            kind = type(forward.read)
            group = groups[kind] = groups.get(kind) or ReadGroup(kind)
            group.members.append(index)
            group.reads.append(forward.read)
            group.slots.append(forward.slots)
            group.keep = group.keep or forward.read.keep
            group.needs_all_rows = group.needs_all_rows or forward.read.needs_all_rows
            group.has_processors = group.has_processors or bool(forward.processors)
            group.top_logprobs = max(group.top_logprobs, forward.top_logprobs)
    in_order = in_order and len(groups) == 1
    rows: list[IntArray] = []
    if not in_order:
        for group in groups.values():
            for index in group.members:
                rows.append(buffer.shift_numbers(forwards[index].rows, spans[index].rows.start))
    further = [[each] for each in backend.plan_arrays(spans)]
    parts = buffer.copy_to_device(
        ids, positions, context_slots + slots, rows, context_positions, *further
    )
    batch = AttentionBatch(
        ids=parts[0],
        positions=parts[1],
        write_slots=parts[2],
        context=(torch.cat(context), parts[4]) if context else None,
        spans=spans,
        features=features,
        plan_arrays=parts[5:],
    )
    wanted, sizes = None if in_order else parts[3], list(map(len, parts[:5]))
    return PackedPass(batch, wanted, [*groups.values()], sizes)
