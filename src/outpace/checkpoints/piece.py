"""The published tensors, or parts of them, that make a model's parameters."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.families.family import part_sizes
from outpace.models.config import ModelConfig
from outpace.models.split import Index, Share
from outpace.models.transformer import Stack

STACKED = (".qkv.", ".gate_up.")
"""Parts of the names of parameters that stack several matrices."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A published tensor, or the slice of it that a process holds.

    Attributes:
        source: Published name.
        shape: Shape of the whole tensor.
        index: Slice that is read; empty for all.
    """

    source: str
    shape: tuple[int, ...]
    index: Index = ()


def sources(config: ModelConfig, name: str, rows: int) -> list[tuple[str, int]]:
    """Return the published tensors of parameter `name`, each with its number of rows."""
    names = FAMILIES[config.family].published(name)
    sizes = part_sizes(config, name) if len(names) > 1 else (rows,)
    return list(zip(names, sizes, strict=True))


def pieces(model: Stack) -> dict[str, list[Piece]]:
    """Return the parts of each parameter of a model, in stacking order."""
    return {
        name: [
            Piece(source, (size, *parameter.shape[1:]))
            for source, size in sources(model.config, name, parameter.shape[0])
        ]
        for name, parameter in model.named_parameters()
    }


def slices(model: Stack, whole: Stack, share: Share) -> dict[str, list[Piece]]:
    """Return the parts of each parameter of a shard of the `whole` model, in stacking order."""
    own = dict(model.named_parameters())
    made: dict[str, list[Piece]] = {}
    for name, parameter in whole.named_parameters():
        names, rest = FAMILIES[whole.config.family].published(name), tuple(parameter.shape[1:])
        sizes = parts(whole, name, len(parameter)), parts(model, name, len(own[name]))
        made[name] = []
        for number, (size, rows) in enumerate(zip(*sizes, strict=True)):
            # Stacked matrices are sharded one by one, also where they are published as one tensor.
            apart = len(names) > 1
            source, total = (names[number], size) if apart else (names[0], len(parameter))
            before = 0 if apart else sum(sizes[0][:number])
            index = share.index((size, *rest), (rows, *own[name].shape[1:]), before)
            made[name].append(Piece(source, (total, *rest), index))
    return made


def parts(model: Stack, name: str, rows: int) -> tuple[int, ...]:
    """Return the rows of each matrix that is stacked in parameter `name`."""
    return part_sizes(model.config, name) if any(part in name for part in STACKED) else (rows,)
