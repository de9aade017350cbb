"""What a model's parameters are made of: published tensors, or parts of them."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.models.config import ModelConfig
from outpace.models.families import FAMILIES
from outpace.models.families.family import part_sizes
from outpace.models.transformer import Stack


@dataclass(frozen=True, slots=True)
class Piece:
    """A published tensor.

    Attributes:
        source: its published name.
        shape: that of the whole tensor.
    """

    source: str
    shape: tuple[int, ...]


def sources(config: ModelConfig, name: str, rows: int) -> list[tuple[str, int]]:
    """Published tensors that make our parameter `name`, and how many of its rows each has."""
    names = FAMILIES[config.family].published(name)
    sizes = part_sizes(config, name) if len(names) > 1 else (rows,)
    return list(zip(names, sizes, strict=True))


def pieces(model: Stack) -> dict[str, list[Piece]]:
    """What each parameter of a model is made of, one behind the other."""
    return {
        name: [
            Piece(source, (size, *parameter.shape[1:]))
            for source, size in sources(model.config, name, parameter.shape[0])
        ]
        for name, parameter in model.named_parameters()
    }
