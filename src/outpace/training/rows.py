"""Rows: what an objective makes of an example, and what a packed batch is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.attention.ranges import causal

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

UNSCORED = -100


@dataclass(slots=True)
class Rows:
    """T rows of one or more documents on one flat axis.

    Attributes:
        ids: `i64[T]`.
        positions: `i64[T]`, rotary positions.
        ranges: `i32[T, 2, 2]`, at most two half-open ranges of keys per row.
        labels: `i64[T]`, the target of the row itself (the model's shift is already applied).
        weights: `f32[T]`, weight of a scored row in the loss.
        mass: what the weights sum to on average; the loss is divided by it.
        features: `[C, width]`, what a target makes of the C rows of plain text among them, where
            that is stored (`Reading`).
    """

    ids: Tensor
    positions: Tensor
    ranges: Tensor
    labels: Tensor
    weights: Tensor
    mass: float
    features: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Rows:
        """The same rows on a device; the ranges stay on the host, where they are cut."""
        moved = ("ids", "positions", "labels", "weights", "features")
        given = {name: getattr(self, name) for name in moved}
        return replace(self, **{n: t.to(device) for n, t in given.items() if t is not None})


def next_tokens(tokens: Ints, worth: Floats) -> Rows:
    """A text as it stands; each row scores the next token, where that is worth something."""
    targets = np.where(worth > 0, tokens, UNSCORED)
    return Rows(
        ids=torch.from_numpy(tokens),
        positions=torch.arange(len(tokens)),
        ranges=causal(len(tokens)),
        labels=torch.from_numpy(np.append(targets[1:], UNSCORED)),
        weights=torch.from_numpy(np.append(worth[1:], 0.0).astype(np.float32)),
        mass=float(worth[1:].sum()),
    )


def join(parts: Sequence[Rows]) -> Rows:
    """Rows one behind the other, whose ranges say so already; all have features, or none has."""
    features = [part.features for part in parts if part.features is not None]
    assert len(features) in (0, len(parts))
    return Rows(
        ids=torch.cat([part.ids for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        ranges=torch.cat([part.ranges for part in parts]).to(torch.int32),
        labels=torch.cat([part.labels for part in parts]),
        weights=torch.cat([part.weights for part in parts]),
        mass=sum(part.mass for part in parts),
        features=torch.cat(features) if features else None,
    )


def pack(parts: Sequence[Rows]) -> Rows:
    """Lay documents side by side; equal lengths become neighbours and share a call."""
    if not parts:
        raise ValueError("there are no rows to pack; give at least one example")
    parts = sorted(parts, key=len)
    starts = torch.tensor([0, *[len(part) for part in parts[:-1]]]).cumsum(0).tolist()
    return join([replace(p, ranges=p.ranges + at) for p, at in zip(parts, starts, strict=True)])
