"""Embeddings of a token for each layer, beside the one for the first (Gemma 3n, 2025).

Shapes: T rows, L layers, S size of an embedding for one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from outpace.models.activation import gelu_tanh
from outpace.models.config import ModelConfig
from outpace.models.norm import build_norm

MIXED_SCALE = 2.0**-0.5
"""Factor on the sum of two parts of equal variance."""


class LayerEmbeddings(nn.Module):
    """What each layer receives of a token: an embedding, plus a projection of the input row."""

    def __init__(
        self, config: ModelConfig, build_embedding: Callable[[int, int], nn.Module]
    ) -> None:
        super().__init__()
        size, width = config.layer_input, config.layers * config.layer_input
        self.table = build_embedding(config.vocab, width)
        self.projection = nn.Linear(config.dim, width, bias=False)
        self.norm = build_norm(config, size)
        self.size, self.scale, self.row_scale = size, math.sqrt(size), config.dim**-0.5

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return `[T, L, S]` of tokens `ids i64[T]` whose input rows are `x [T, dim]`."""
        # The scale is rounded to the dtype first, as in the authors' code.
        found = self.table(ids) * torch.tensor(self.scale, dtype=x.dtype)
        projected: Tensor = (self.projection(x) * self.row_scale).unflatten(-1, (-1, self.size))
        mixed: Tensor = self.norm(projected) + found.view_as(projected)
        return mixed * MIXED_SCALE


class LayerGate(nn.Module):
    """A gate of the rows of a layer on their embeddings, and a projection to hidden size."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.layer_input, bias=False)
        self.projection = nn.Linear(config.layer_input, config.dim, bias=False)
        self.norm = build_norm(config)

    def forward(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """Return what is added to rows `x [T, dim]`, given their input `[T, S]` of this layer."""
        added: Tensor = self.norm(self.projection(gelu_tanh(self.gate(x)) * layer_input))
        return added
