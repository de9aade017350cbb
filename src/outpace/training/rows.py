"""Rows: the model inputs, attention ranges and labels of training examples, and their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from outpace.attention.ranges import causal_ranges
from outpace.errors import OptionError
from outpace.training.data import Example

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

UNSCORED = -100


@dataclass(slots=True)
class Rows:
    """T rows of one or more packed documents, on one flat axis."""

    ids: Tensor
    """`i64[T]`."""
    positions: Tensor
    """`i64[T]`, rotary positions."""
    ranges: Tensor
    """`i32[T, 2, 2]`, at most two half-open ranges of keys per row."""
    labels: Tensor
    """`i64[T]`, the label of each row (the model's shift is already applied), or `UNSCORED`."""
    weights: Tensor
    """`f32[T]`, weights of scored rows in the loss."""
    normaliser: float
    """Expected sum of the weights, by which the loss is divided."""
    features: Tensor | None = None
    """`[C, width]`, stored target features of the C plain-text rows (`FeatureSpec`)."""

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Rows:
        """Copy the rows to a device; the ranges stay on the host, where attention is planned."""
        moved = ("ids", "positions", "labels", "weights", "features")
        tensors = {name: getattr(self, name) for name in moved}
        return replace(self, **{n: t.to(device) for n, t in tensors.items() if t is not None})


def next_token_rows(tokens: Ints, token_weights: Floats) -> Rows:
    """Build causal rows of a sequence; each predicts the next token if its weight is positive."""
    targets = np.where(token_weights > 0, tokens, UNSCORED)
    return Rows(
        ids=torch.from_numpy(tokens),
        positions=torch.arange(len(tokens)),
        ranges=causal_ranges(len(tokens)),
        labels=torch.from_numpy(np.append(targets[1:], UNSCORED)),
        weights=torch.from_numpy(np.append(token_weights[1:], 0.0).astype(np.float32)),
        normaliser=float(token_weights[1:].sum()),
    )


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows whose ranges already account for it; all or none have features."""
    features = [part.features for part in parts if part.features is not None]
    assert len(features) in (0, len(parts))
    return Rows(
        ids=torch.cat([part.ids for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        ranges=torch.cat([part.ranges for part in parts]).to(torch.int32),
        labels=torch.cat([part.labels for part in parts]),
        weights=torch.cat([part.weights for part in parts]),
        normaliser=sum(part.normaliser for part in parts),
        features=torch.cat(features) if features else None,
    )


def pack_documents(parts: Sequence[Rows]) -> Rows:
    """Pack documents, sorted by length so that equal lengths share an attention call."""
    if not parts:
        raise ValueError("no rows to pack; give at least one example")
    parts = sorted(parts, key=len)
    starts = torch.tensor([0, *[len(part) for part in parts[:-1]]]).cumsum(0).tolist()
    return join_rows(
        [replace(p, ranges=p.ranges + at) for p, at in zip(parts, starts, strict=True)]
    )


@dataclass(frozen=True, slots=True)
class Response:
    """A padded response, with the weight of each token in the loss."""

    tokens: Ints
    """`i64[n]`, without the prompt."""
    token_weights: Floats
    """`f64[n]`."""
    marked: Bools
    """`bool[n]`, see `Data.mark`."""

    def __len__(self) -> int:
        return len(self.tokens)


def pad_response(
    example: Example,
    bounds: tuple[int, int] | None,
    rng: Generator,
    *,
    mark_weight: float = 1.0,
    end_weight: float = 1.0,
) -> Response:
    """Pad a complete response with its end token to a random length within `bounds`.

    `end_weight` is the weight of padding tokens, `mark_weight` that of marked ones.
    """
    response, length = example.response, len(example.response)
    weights = [mark_weight if mark else 1.0 for mark in example.marks]
    if bounds is not None and example.ended:
        low, high = (max(length, bound) for bound in bounds)
        length = int(rng.integers(low, high + 1))
    padding = length - len(response)
    tokens = np.array([*response, *[response[-1]] * padding])
    marked = np.array([*example.marks, *[False] * padding])
    return Response(tokens, np.array([*weights, *[end_weight] * padding]), marked)


def check_canvas(bounds: tuple[int, int] | None) -> None:
    if bounds is not None and not 1 <= bounds[0] <= bounds[1]:
        raise OptionError("canvas", bounds, "must be a minimum length of at least 1 and a maximum")


def masked_rows(
    tokens: Ints, masked: Bools, weights: Floats, ranges: Tensor, *, shift: int, mask_id: int
) -> Rows:
    """Build rows with masked tokens replaced by the mask token.

    Row p predicts slot p + `shift`. Masked tokens of weight 0 are not scored. The normaliser is
    the sum of the weights.
    """
    targets = np.where(masked & (weights > 0), tokens, UNSCORED)
    labels = np.append(targets[shift:], np.full(shift, UNSCORED))
    scale = np.append(weights[shift:], np.zeros(shift))
    return Rows(
        ids=torch.from_numpy(np.where(masked, mask_id, tokens)),
        positions=torch.arange(len(tokens)),
        ranges=ranges,
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(scale.astype(np.float32)),
        normaliser=float(scale.sum()),
    )
