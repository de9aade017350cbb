"""What a model's parameters are made of: published tensors, or parts of them."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.families.family import part_sizes
from outpace.models.config import ModelConfig
from outpace.models.split import Index, Share
from outpace.models.transformer import Stack

STACKED = (".qkv.", ".gate_up.")
"""In the names of parameters in which several matrices are stacked."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A published tensor, or what of it a process holds.

    Attributes:
        source: its published name.
        shape: that of the whole tensor.
        index: what is read of it; empty for all.
    """

    source: str
    shape: tuple[int, ...]
    index: Index = ()


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


def slices(model: Stack, whole: Stack, share: Share) -> dict[str, list[Piece]]:
    """What each parameter of a slice of a `whole` model is made of, one behind the other."""
    own = dict(model.named_parameters())
    made: dict[str, list[Piece]] = {}
    for name, parameter in whole.named_parameters():
        names, rest = FAMILIES[whole.config.family].published(name), tuple(parameter.shape[1:])
        sizes = parts(whole, name, len(parameter)), parts(model, name, len(own[name]))
        made[name] = []
        for number, (size, rows) in enumerate(zip(*sizes, strict=True)):
            # Parts that are stacked are shared out one by one, also where they come as one tensor.
            apart = len(names) > 1
            source, total = (names[number], size) if apart else (names[0], len(parameter))
            before = 0 if apart else sum(sizes[0][:number])
            index = share.index((size, *rest), (rows, *own[name].shape[1:]), before)
            made[name].append(Piece(source, (total, *rest), index))
    return made


def parts(model: Stack, name: str, rows: int) -> tuple[int, ...]:
    """Rows of each part that is stacked in our parameter `name`."""
    return part_sizes(model.config, name) if any(part in name for part in STACKED) else (rows,)
