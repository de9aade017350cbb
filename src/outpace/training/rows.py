"""Rows: what an objective makes of an example, and what a packed batch is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UNSCORED = -100


@dataclass(slots=True)
class Rows:
    """T rows of one or more documents on one flat axis.

    Attributes:
        ids: i64[T].
        positions: i64[T], rotary positions.
        ranges: i32[T, 2, 2], at most two half-open key ranges a row.
        labels: i64[T], the target of the row itself (the model's shift is already applied).
        weights: f32[T], weight of a scored row in the loss.
        mass: What the weights sum to on average; the loss is divided by it.
    """

    ids: Tensor
    positions: Tensor
    ranges: Tensor
    labels: Tensor
    weights: Tensor
    mass: float

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> "Rows":
        """The same rows on a device; the ranges stay on the host, where they are cut."""
        return Rows(
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            ranges=self.ranges,
            labels=self.labels.to(device),
            weights=self.weights.to(device),
            mass=self.mass,
        )


def join(parts: Sequence[Rows]) -> Rows:
    """Rows one behind the other, whose ranges say so already."""
    return Rows(
        ids=torch.cat([part.ids for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        ranges=torch.cat([part.ranges for part in parts]).to(torch.int32),
        labels=torch.cat([part.labels for part in parts]),
        weights=torch.cat([part.weights for part in parts]),
        mass=sum(part.mass for part in parts),
    )


def pack(parts: Sequence[Rows]) -> Rows:
    """Lay documents side by side; equal lengths become neighbours and share a call."""
    if not parts:
        raise ValueError("there are no rows to pack; give at least one example")
    parts = sorted(parts, key=len)
    starts = torch.tensor([0, *[len(part) for part in parts[:-1]]]).cumsum(0).tolist()
    return join([replace(p, ranges=p.ranges + at) for p, at in zip(parts, starts, strict=True)])
