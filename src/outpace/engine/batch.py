"""Forwards of many sequences as the tensors of one ragged pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outpace.attention.dense import Segment
from outpace.decoding import CAUSAL, Forward, Read
from outpace.decoding.forward import IntArray
from outpace.engine.cache import Table
from outpace.models.config import Sight

PLAIN = Sight()


@dataclass(slots=True)
class Batch:
    """T rows of many sequences, of which R are read, and the C rows of their context.

    Attributes:
        ids: `i64[T]` token ids.
        positions: `i64[T]` rotary positions.
        context, context_positions: `[C, f]` features and `i64[C]`, None where there are none.
        write: `i64[C + T]` physical slots, those of the context first.
        rows: place of each sequence's rows.
        segments: for each kind of layer, a sequence's rows and what they see.
        predict: `i64[R]` rows whose logits are wanted, those of one read type together; None
            where that is all rows in their order.
        reads: for each read type, the forwards that ask for it.
    """

    ids: Tensor
    positions: Tensor
    context: Tensor | None
    context_positions: Tensor | None
    write: Tensor
    rows: list[slice]
    segments: dict[Sight, list[Segment]]
    predict: Tensor | None
    reads: list[tuple[type[Read], list[int]]]


def pack(
    forwards: Sequence[Forward],
    tables: Sequence[Table],
    shift: int,
    device: torch.device,
    sights: Sequence[Sight] = (),
) -> Batch:
    """Lay the rows of all forwards one behind the other; `sights` are those of the layers."""
    ids: list[int] = []
    positions, write, behind, predict = [], [], [], []
    rows: list[slice] = []
    for forward, table in zip(forwards, tables, strict=True):
        begin = len(ids)
        ids.extend(forward.ids)
        rows.append(slice(begin, len(ids)))
        write.append(table.slots[forward.start : forward.end])
        positions.append(
            np.arange(forward.start, forward.end)
            if forward.positions is None
            else np.asarray(forward.positions)
        )
        predict.append(forward.predicted_rows(shift) + begin)
        if forward.context is not None:
            behind.append((forward, table))
    groups: dict[type[Read], list[int]] = {}
    for index, forward in enumerate(forwards):
        groups.setdefault(type(forward.read), []).append(index)
    order = [predict[index] for group in groups.values() for index in group]
    written = [table.slots[forward.first : forward.start] for forward, table in behind]
    places = [np.arange(forward.first, forward.start) for forward, _ in behind]
    contexts = [forward.context for forward, _ in behind if forward.context is not None]
    return Batch(
        ids=torch.tensor(ids, device=device),
        positions=join(positions, device),
        context=torch.cat(contexts) if contexts else None,
        context_positions=join(places, device) if contexts else None,
        write=join(written + write, device),
        rows=rows,
        segments={
            sight: [
                segment(forward, table, at, device, sight)
                for forward, table, at in zip(forwards, tables, rows, strict=True)
            ]
            for sight in set(sights) or {PLAIN}
        },
        predict=None if in_order(order, len(ids)) else join(order, device),
        reads=list(groups.items()),
    )


def in_order(rows: list[IntArray], count: int) -> bool:
    """Whether these are all rows, from the first to the last."""
    return sum(map(len, rows)) == count and bool((np.concatenate(rows) == np.arange(count)).all())


def join(parts: list[IntArray], device: torch.device) -> Tensor:
    """Arrays of all sequences as one tensor."""
    return torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0]).to(device)


def segment(
    forward: Forward, table: Table, rows: slice, device: torch.device, sight: Sight
) -> Segment:
    """What the rows of one forward see in one kind of layer; no mask where none is needed."""
    window = table.window(forward.seen)
    slots = window if isinstance(window, slice) else torch.from_numpy(window).to(device)
    stops = forward.stops()
    if sight == PLAIN:
        if stops[0] == forward.seen:
            return Segment(rows=rows, slots=slots)
        if forward.mask == CAUSAL and forward.start == 0:
            return Segment(rows=rows, slots=slots, causal=True)
    return Segment(rows=rows, slots=slots, mask=visible(forward, stops, sight).to(device))


def visible(forward: Forward, stops: IntArray, sight: Sight) -> Tensor:
    """Which slots each row sees in one kind of layer, `bool[n, seen]`."""
    slots = np.arange(forward.seen)
    mask = slots < stops[:, None]
    own = np.arange(forward.start, forward.end)[:, None]
    if sight.causal:
        mask &= slots <= own
    if sight.window is not None:
        mask &= slots > own - sight.window
    return torch.from_numpy(mask)
