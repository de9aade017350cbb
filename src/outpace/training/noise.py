"""Padding of responses, and rows with masked tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from outpace.training.data import Example
from outpace.training.rows import UNSCORED, Bools, Floats, Ints, Rows


@dataclass(frozen=True, slots=True)
class Response:
    """A padded response, with the weight of each token in the loss.

    Attributes:
        tokens: `i64[n]`, without the prompt.
        token_weights: `f64[n]`.
        marked: `bool[n]`, see `Data.mark`.
        content_length: length without padding.
    """

    tokens: Ints
    token_weights: Floats
    marked: Bools
    content_length: int

    @classmethod
    def without_padding(cls, tokens: Ints) -> Response:
        """Create a response without padding or marks, of weight 1."""
        return cls(tokens, np.ones(len(tokens)), np.zeros(len(tokens), dtype=bool), len(tokens))

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
    return Response(tokens, np.array([*weights, *[end_weight] * padding]), marked, len(response))


def check_canvas(bounds: tuple[int, int] | None) -> None:
    """Raise `ValueError` unless the bounds of a canvas are positive and in order."""
    if bounds is not None and not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(
            f"canvas must be a minimum length of at least 1 and a maximum, got {bounds}"
        )


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
