"""The published tensors, or parts of them, that make a model's parameters."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from outpace.checkpoints.families import config_family
from outpace.checkpoints.families.family import part_sizes
from outpace.models.config import ModelConfig
from outpace.models.split import ModelShard, ShardIndex
from outpace.models.transformer import Stack

STACKED_PARAMETERS = (".qkv.", ".gate_up.")
"""Parts of the names of parameters that stack several matrices."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A published tensor, or the slice of it that a process holds.

    Attributes:
        source: Published name.
        shape: Shape of the whole tensor.
        index: Slice that is read; empty for all.
    """

    source: str
    shape: tuple[int, ...]
    index: ShardIndex = ()


def source_tensors(
    config: ModelConfig, name: str, rows: int, stored: Container[str] = ()
) -> list[tuple[str, int]]:
    """Return the published tensors of parameter `name`, each with its number of rows.

    `stored` are the tensors of a checkpoint, by which names are chosen if there are several.
    """
    names = config_family(config).tensor_names(name, stored)
    sizes = part_sizes(config, name) if len(names) > 1 else (rows,)
    return [(source, size) for source, size in zip(names, sizes, strict=True) if size]


def parameter_parts(model: Stack, stored: Container[str]) -> dict[str, list[TensorPart]]:
    """Return the parts of each parameter of a model in a checkpoint, in stacking order."""
    return {
        name: [
            TensorPart(source, (size, *parameter.shape[1:]))
            for source, size in source_tensors(model.config, name, parameter.shape[0], stored)
        ]
        for name, parameter in model.named_parameters()
    }


def sharded_parts(model: Stack, whole: Stack, share: ModelShard) -> dict[str, list[TensorPart]]:
    """Return the parts of each parameter of a shard of the `whole` model, in stacking order."""
    own = dict(model.named_parameters())
    made: dict[str, list[TensorPart]] = {}
    for name, parameter in whole.named_parameters():
        names, rest = config_family(whole.config).tensor_names(name), tuple(parameter.shape[1:])
        sizes = (
            stacked_sizes(whole, name, len(parameter)),
            stacked_sizes(model, name, len(own[name])),
        )
        made[name] = []
        for number, (size, rows) in enumerate(zip(*sizes, strict=True)):
            # Stacked matrices are sharded one by one, even if they are published as one tensor.
            apart = len(names) > 1
            source, total = (names[number], size) if apart else (names[0], len(parameter))
            before = 0 if apart else sum(sizes[0][:number])
            index = share.shard_index((size, *rest), (rows, *own[name].shape[1:]), before)
            made[name].append(TensorPart(source, (total, *rest), index))
    return made


def stacked_sizes(model: Stack, name: str, rows: int) -> tuple[int, ...]:
    """Return the number of rows of each matrix that is stacked in parameter `name`."""
    return (
        part_sizes(model.config, name)
        if any(part in name for part in STACKED_PARAMETERS)
        else (rows,)
    )
