"""Published tensors that are stacks of matrices, such as those of all experts of a layer.

A name such as `experts.down_proj[3]` is an entry of one, and `experts.down_proj[3].T` an entry that
is turned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

NAME = re.compile(r"(?P<stack>.+)\[(?P<number>\d+)\](?P<turned>\.T)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One matrix or vector of a stack; a `turned` one is published with rows for columns."""

    stack: str
    number: int
    turned: bool

    @classmethod
    def of(cls, name: str) -> Entry | None:
        """What a name says; None for that of a tensor which is no stack."""
        found = NAME.fullmatch(name)
        return found and cls(found["stack"], int(found["number"]), bool(found["turned"]))


def held(name: str) -> str:
    """The tensor that a file has: the stack of an entry, else the one of that name."""
    entry = Entry.of(name)
    return name if entry is None else entry.stack


def sizes(names: Iterable[str]) -> dict[str, int]:
    """How many entries each stack has."""
    found: dict[str, int] = {}
    for entry in map(Entry.of, names):
        if entry is not None:
            found[entry.stack] = max(found.get(entry.stack, 0), entry.number + 1)
    return found


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by published names, entries put together into stacks."""
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if (entry := Entry.of(name)) is None:
            whole[name] = tensor
        else:
            own = parts.setdefault(entry.stack, {})
            own[entry.number] = tensor.T if entry.turned else tensor
    return whole | {
        stack: torch.stack([own[number] for number in sorted(own)]) for stack, own in parts.items()
    }
