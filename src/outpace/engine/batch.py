"""Forwards of many sequences as the tensors of one ragged pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outpace.attention.dense import Segment
from outpace.decoding import CAUSAL, FULL, Forward, Read
from outpace.decoding.forward import IntArray
from outpace.engine.cache import Table


@dataclass(slots=True)
class Batch:
    """T rows of many sequences, of which R are read.

    Attributes:
        ids: `i64[T]` token ids.
        positions: `i64[T]` rotary positions.
        write: `i64[T]` physical slot of each row.
        segments: a sequence's rows and what they see.
        predict: `i64[R]` rows whose logits are wanted, those of one read type together.
        reads: for each read type, the forwards that ask for it.
    """

    ids: Tensor
    positions: Tensor
    write: Tensor
    segments: list[Segment]
    predict: Tensor
    reads: list[tuple[type[Read], list[int]]]


def pack(
    forwards: Sequence[Forward], tables: Sequence[Table], shift: int, device: torch.device
) -> Batch:
    """Lay the rows of all forwards one behind the other."""
    ids: list[int] = []
    positions, write, segments, rows = [], [], [], []
    first = 0
    for forward, table in zip(forwards, tables, strict=True):
        n = len(forward.ids)
        ids.extend(forward.ids)
        write.append(table.slots[forward.start : forward.end])
        positions.append(
            np.arange(forward.start, forward.end)
            if forward.positions is None
            else np.asarray(forward.positions)
        )
        segments.append(segment(forward, table, slice(first, first + n), device))
        rows.append(forward.predicted_rows(shift) + first)
        first += n
    groups: dict[type[Read], list[int]] = {}
    for index, forward in enumerate(forwards):
        groups.setdefault(type(forward.read), []).append(index)
    order = [rows[index] for group in groups.values() for index in group]
    return Batch(
        torch.tensor(ids, device=device),
        join(positions, device),
        join(write, device),
        segments,
        join(order, device),
        list(groups.items()),
    )


def join(parts: list[IntArray], device: torch.device) -> Tensor:
    """Arrays of all sequences as one tensor."""
    return torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0]).to(device)


def segment(forward: Forward, table: Table, rows: slice, device: torch.device) -> Segment:
    """What the rows of one forward see; no mask where none is needed."""
    window = table.window(forward.seen)
    slots = window if isinstance(window, slice) else torch.from_numpy(window).to(device)
    if forward.mask == FULL or len(forward.ids) == 1:
        return Segment(rows=rows, slots=slots)
    if forward.mask == CAUSAL and forward.start == 0:
        return Segment(rows=rows, slots=slots, causal=True)
    stops = forward.stops()
    if stops[0] == forward.seen:
        return Segment(rows=rows, slots=slots)
    mask = torch.arange(forward.seen) < torch.from_numpy(stops)[:, None]
    return Segment(rows=rows, slots=slots, mask=mask.to(device))
