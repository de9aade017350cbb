"""What was read on a device, as predictions on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.decoding import Prediction, Read
from outpace.decoding.sampling import Readout, Score
from outpace.engine.feed import Feed


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


def collect(
    parts: Sequence[Part], feeds: Sequence[Feed], reads: Sequence[tuple[type[Read], list[int]]]
) -> list[Prediction]:
    """One copy of all readouts to the host, cut into the predictions of each feed.

    Raises `ArithmeticError` where logits are no numbers.
    """
    predictions = [Prediction(tokens=[]) for _ in feeds]
    if not parts:
        return predictions
    names: list[Score] = sorted({name for part in parts for name in part.readout.scores})
    tokens, table = to_host(parts, names)
    if -1 in tokens:
        raise ArithmeticError("the model's logits are not finite numbers")
    begin = 0
    for _, members in reads:
        for index in members:
            feed, prediction = feeds[index], predictions[index]
            end = begin + len(feed.slots)
            prediction.tokens = tokens[begin:end]
            if feed.read.scores:
                prediction.scores = {
                    name: table[row, begin:end].astype(np.float32)
                    for row, name in enumerate(names)
                    if name in feed.read.scores
                }
            begin = end
    keep(parts, feeds, reads, predictions)
    return predictions


def to_host(
    parts: Sequence[Part], names: Sequence[Score]
) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """Tokens, and a row of the table for each score; float64 holds a token id exactly.

    The token of a row whose logits are no numbers is -1.
    """
    chosen = join([part.chosen for part in parts])
    tokens = torch.where(chosen.isfinite(), join([part.readout.tokens for part in parts]), -1)
    if not names:
        return tokens.tolist(), np.empty((0, len(tokens)))
    missing = [torch.zeros_like(part.chosen) for part in parts]
    columns = [
        join(
            [part.readout.scores.get(name, none) for part, none in zip(parts, missing, strict=True)]
        )
        for name in names
    ]
    table = torch.stack([column.double() for column in (tokens, *columns)]).cpu().numpy()
    return table[0].astype(np.int64).tolist(), table[1:]


def keep(
    parts: Sequence[Part],
    feeds: Sequence[Feed],
    reads: Sequence[tuple[type[Read], list[int]]],
    predictions: Sequence[Prediction],
) -> None:
    """Leave the raw logits that reads keep on the device."""
    kept = iter(part.logits for part in parts if part.logits is not None)
    for _, members in reads:
        if not any(feeds[index].read.keep for index in members):
            continue
        sizes = [len(feeds[index].slots) for index in members]
        rows: list[Tensor] = []
        while sum(map(len, rows)) < sum(sizes):
            rows.append(next(kept))
        for index, logits in zip(members, join(rows).split(sizes), strict=True):
            if feeds[index].read.keep:
                predictions[index].logits = logits


def join(parts: Sequence[Tensor]) -> Tensor:
    """Parts one behind the other."""
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
