"""What was read on a device, as predictions on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.decoding import Prediction
from outpace.decoding.sampling import Readout, Score
from outpace.engine.feed import Feed
from outpace.engine.pack import ReadGroup


class Part(NamedTuple):
    """What a chunk of rows was read as, the logits of the chosen tokens, and kept logits."""

    readout: Readout
    chosen: Tensor
    logits: Tensor | None

    @classmethod
    def of(cls, readout: Readout, logits: Tensor, *, keep: bool) -> Part:
        """A readout of `logits [r, V]`.

        The chosen ones say whether a row is one of numbers: what is none is the largest of a row,
        and so is chosen.
        """
        chosen = logits.gather(-1, readout.tokens[:, None]).squeeze(-1)
        return cls(readout, chosen, logits if keep else None)


NOTHING, NO_SCORES = torch.empty(0, dtype=torch.int64), np.empty((0, 0))
"""What is sent where nothing was read, and the table where no score was."""


class Sent:
    """Tokens and scores on their way to the host, in one copy; `wait` ends when they are there.

    Where a GPU copies, it does so behind what it was told before, into pinned memory, and goes on
    with what it is told next.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.names: list[Score] = sorted({name for part in parts for name in part.readout.scores})
        table = table_of(parts, self.names) if parts else NOTHING
        self.arrived: torch.cuda.Event | None = None
        if table.is_cuda:
            self.table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self.table.copy_(table, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(table.device))
        else:
            self.table = table

    def wait(self) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
        """Tokens, and a row for each of the `names`.

        The token of a row whose logits are no numbers is -1.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        if not self.names:
            return self.table.tolist(), NO_SCORES
        table = self.table.cpu().numpy()
        return table[0].astype(np.int64).tolist(), table[1:]


def table_of(parts: Sequence[Part], names: Sequence[Score]) -> Tensor:
    """Tokens, and behind them a row for each score; float64 holds a token id exactly."""
    chosen = join([part.chosen for part in parts])
    tokens = torch.where(chosen.isfinite(), join([part.readout.tokens for part in parts]), -1)
    if not names:
        return tokens
    missing = [torch.zeros_like(part.chosen) for part in parts]
    columns = [
        join(
            [part.readout.scores.get(name, none) for part, none in zip(parts, missing, strict=True)]
        )
        for name in names
    ]
    return torch.stack([column.double() for column in (tokens, *columns)])


@dataclass(frozen=True, slots=True)
class Launched:
    """A pass that a device was told to run, and what comes of it.

    Attributes:
        feeds: what it was fed.
        groups: the feeds that were read, by type of read.
        parts: what was read, on the device.
        sent: tokens and scores on their way to the host.
        features: hidden states of the feeds that want some.
        began: reading of `time.perf_counter` when it was begun.
    """

    feeds: Sequence[Feed]
    groups: Sequence[ReadGroup]
    parts: Sequence[Part]
    sent: Sent
    features: Mapping[int, Tensor]
    began: float

    def land(self) -> list[Prediction]:
        """Wait for the device: the predictions of all feeds.

        Raises `ArithmeticError` where logits are no numbers.
        """
        predictions = [
            Prediction(tokens=[], features=self.features.get(index))
            for index in range(len(self.feeds))
        ]
        if not self.parts:
            return predictions
        tokens, table = self.sent.wait()
        if -1 in tokens:
            raise ArithmeticError("the model's logits are not finite numbers")
        begin = 0
        for group in self.groups:
            for index in group.members:
                feed, prediction = self.feeds[index], predictions[index]
                end = begin + len(feed.slots)
                prediction.tokens = tokens[begin:end]
                if feed.read.scores:
                    prediction.scores = {
                        name: table[row, begin:end].astype(np.float32)
                        for row, name in enumerate(self.sent.names)
                        if name in feed.read.scores
                    }
                begin = end
        if any(group.keep for group in self.groups):
            keep(self.parts, self.feeds, self.groups, predictions)
        return predictions


def keep(
    parts: Sequence[Part],
    feeds: Sequence[Feed],
    groups: Sequence[ReadGroup],
    predictions: Sequence[Prediction],
) -> None:
    """Leave the raw logits that reads keep on the device."""
    kept = iter(part.logits for part in parts if part.logits is not None)
    for group in groups:
        if not group.keep:
            continue
        sizes = list(map(len, group.slots))
        rows: list[Tensor] = []
        while sum(map(len, rows)) < sum(sizes):
            rows.append(next(kept))
        for index, logits in zip(group.members, join(rows).split(sizes), strict=True):
            if feeds[index].read.keep:
                predictions[index].logits = logits


def join(parts: Sequence[Tensor]) -> Tensor:
    """Parts one behind the other."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
