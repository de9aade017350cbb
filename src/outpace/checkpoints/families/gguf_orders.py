"""Orders of rows, and values of norms, in which llama.cpp's files differ from published ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from outpace.checkpoints.families.gguf_format import Order
from outpace.models.config import ModelConfig


def unpair_heads(config: ModelConfig, count: int) -> Tensor:
    """Return the places of queries or keys: the two halves of a head are interleaved.

    Rotary embedding rotates the two rows of a pair; only their places differ.
    """
    half = config.head_dim // 2
    return torch.arange(count).unflatten(0, (-1, half, 2)).transpose(1, 2).flatten()


def alternate_halves(config: ModelConfig, count: int) -> Tensor:
    """Return the places of rows that the file has as two matrices, and that alternate."""
    return torch.arange(count).unflatten(0, (2, -1)).T.flatten()


PAIRED_ROWS: Mapping[str, Order] = {
    f"{name}_proj.{kind}": unpair_heads for name in "qk" for kind in ("weight", "bias")
}
"""Tensors whose rotary dimensions llama.cpp interleaves in pairs, in Llama and its relatives."""


def subtract_one(norm: Tensor) -> Tensor:
    """Return the published weights of a norm, to which the model's code adds 1."""
    return norm - 1.0
