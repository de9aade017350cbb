"""Scheduled forwards, checked and split, and their packing as the tensors of one ragged pass."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import index

import numpy as np
import torch
from torch import Tensor

from outpace.attention.batch import AttentionBatch, Backend, RowSpan
from outpace.decoding import CAUSAL, Forward, Processor, Read, Tree
from outpace.decoding.forward import IntArray, Pattern, shift_numbers
from outpace.engine.cache import PageTable
from outpace.engine.recurrent import check_recurrent
from outpace.models.config import ModelConfig


@dataclass(slots=True, kw_only=True)
class ScheduledForward(Forward):
    """One sequence's forward in one pass, a copy that its method cannot change.

    Attributes:
        table: memory of the sequence.
        rows: rows whose logits are wanted.
        slots: the slots that they predict.
        layers: layers whose hidden states are wanted, concatenated.
        processors: logits processors of the wanted rows.
        top_logprobs: number of most probable tokens of the wanted rows to return.
        text: the text from slot 0 on, as the processors need it.
        settled: slot before which no later forward of the sequence starts.
        missing: leading rows found in the prefix cache whose hidden states are wanted but were not
            computed.
        has_gap: whether rows after these were skipped too, which the draft has to read first: no
            further hidden states are wanted.
    """

    table: PageTable
    rows: Sequence[int]
    slots: Sequence[int]
    layers: tuple[int, ...] = ()
    processors: tuple[Processor, ...] = ()
    top_logprobs: int = 0
    text: Sequence[int] = ()
    settled: int = 0
    missing: int = 0
    has_gap: bool = False

    @classmethod
    def from_forward(
        cls,
        forward: Forward,
        table: PageTable,
        config: ModelConfig,
        *,
        positions: int | None = None,
        layers: tuple[int, ...] = (),
        processors: tuple[Processor, ...] = (),
        top_logprobs: int = 0,
        text: Sequence[int] = (),
        settled: int = 0,
    ) -> ScheduledForward:
        """Check a forward; raise `ValueError` or `TypeError` where its model cannot run it."""
        forward.check_bounds(
            vocab=config.vocab,
            length=config.max_length if positions is None else positions,
            slots=table.size,
            written=table.written,
            feature_size=0 if config.feature_widths else config.feature_size,
            widths=config.feature_widths,
        )
        if config.delta is not None:
            check_recurrent(forward, table)
        return cls(
            ids=copy_integers(forward.ids),
            start=forward.start,
            pattern=forward.pattern,
            positions=None if forward.positions is None else copy_integers(forward.positions),
            visible_end=forward.visible_end,
            read=forward.read,
            model=forward.model,
            context=forward.context,
            features=forward.features,
            features_for=forward.features_for,
            branches=forward.branches,
            table=table,
            rows=copy_integers(forward.predicted_rows(config.shift)),
            slots=forward.predicted_slots(),
            layers=layers,
            processors=processors,
            top_logprobs=top_logprobs if "logprob" in forward.read.scores else 0,
            text=text,
            settled=settled,
        )

    @property
    def splittable_rows(self) -> int:
        """Number of leading rows without wanted logits, if the pattern can be split."""
        is_splittable = self.pattern == CAUSAL or isinstance(self.pattern, tuple)
        if not is_splittable or self.context is not None:
            return 0
        return min(self.rows) if self.rows else len(self.ids) - 1

    def find_split(self, max_rows: int) -> int:
        """Return how many leading rows, at most `max_rows`, can run in an earlier pass."""
        max_rows = min(max_rows, self.splittable_rows)
        if not isinstance(self.pattern, tuple):
            return max_rows
        ends = list(accumulate(self.pattern, initial=0))
        return ends[bisect_right(ends, max_rows) - 1]

    def mask_runs(self, mask_id: int, first: int) -> tuple[range, ...]:
        """Return the runs of mask slots from slot `first` on, in slot order."""
        if mask_id not in self.ids:
            return ()
        if self.positions is None:
            row, count = self.ids.index(mask_id), self.ids.count(mask_id)
            begin = self.start + row
            if begin >= first and self.ids[row : row + count].count(mask_id) == count:
                return (range(begin, begin + count),)  # one run, the common case
        positions = range(self.start, self.end) if self.positions is None else self.positions
        rows = zip(positions, self.ids, strict=True)
        slots = sorted({place for place, token in rows if token == mask_id and place >= first})
        runs: list[range] = []
        for slot in slots:
            if runs and slot == runs[-1].stop:
                runs[-1] = range(runs[-1].start, slot + 1)
            else:
                runs.append(range(slot, slot + 1))
        return tuple(runs)

    def make_span(self, begin: int) -> RowSpan:
        """Return its attention span; its first row is row `begin` of the pass."""
        ends = None if self.pattern == CAUSAL else self.visible_ends()
        rows = slice(begin, begin + len(self.ids))
        tree = self.pattern if isinstance(self.pattern, Tree) else None
        return RowSpan(rows, self.start, self.num_visible, ends, self.table, tree, self.settled)

    def split_at(self, count: int) -> tuple[ScheduledForward, ScheduledForward]:
        """Return the first `count` rows, without wanted logits, and the rest."""
        positions, features = self.positions, self.features
        head_pattern, tail_pattern = split_pattern(self.pattern, count)
        head = replace(
            self,
            ids=self.ids[:count],
            pattern=head_pattern,
            visible_end=None,
            features=None if features is None else features[:count],
            branches=None,
            positions=None if positions is None else positions[:count],
            rows=[],
            slots=(),
        )
        tail = replace(
            self,
            ids=self.ids[count:],
            pattern=tail_pattern,
            features=None if features is None else features[count:],
            start=self.start + count,
            positions=None if positions is None else positions[count:],
            rows=shift_numbers(self.rows, -count),
            missing=0,
        )
        return head, tail


def split_pattern(pattern: Pattern, count: int) -> tuple[Pattern, Pattern]:
    """Return the patterns of the first `count` rows and of the rest; no row's view changes."""
    if not isinstance(pattern, tuple):
        return pattern, pattern
    ends = list(accumulate(pattern, initial=0))
    head_ends = [*ends[: bisect_left(ends, count)], count]
    tail_ends = [count, *ends[bisect_right(ends, count) :]]
    head, tail = (tuple(end - begin for begin, end in pairwise(e)) for e in (head_ends, tail_ends))
    return head, tail


def copy_integers(numbers: Sequence[int]) -> Sequence[int]:
    """Return a copy; raise `TypeError` for entries that are not whole numbers."""
    if isinstance(numbers, range) and numbers.step == 1:
        return numbers
    copy = list(numbers)
    # The sum of numbers is whole where all of them are.
    return copy if type(sum(copy)) is int else list(map(index, copy))


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
    for member, forward in enumerate(forwards):
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
        # If all rows are wanted in their order, none has to be selected.
        in_order = in_order and forward.rows == range(len(forward.ids))
        if forward.rows:
            kind = type(forward.read)
            group = groups[kind] = groups.get(kind) or ReadGroup(kind)
            group.members.append(member)
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
            for member in group.members:
                rows.append(buffer.shift_numbers(forwards[member].rows, spans[member].rows.start))
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
