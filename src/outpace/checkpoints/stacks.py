"""Published tensors that stack several matrices, such as those of all experts of a layer.

The name `experts.down_proj[3]` is one entry of such a stack, and `experts.down_proj[3].T` its
transpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ENTRY_NAME = re.compile(r"(?P<stack>.+)\[(?P<number>\d+)\](?P<turned>\.T)?")


@dataclass(frozen=True, slots=True)
class StackEntry:
    """One matrix or vector of a stack, published transposed if `is_transposed`."""

    stack: str
    number: int
    is_transposed: bool

    @classmethod
    def from_name(cls, name: str) -> StackEntry | None:
        """Parse a name; None if it is not an entry of a stack."""
        found = ENTRY_NAME.fullmatch(name)
        return found and cls(found["stack"], int(found["number"]), bool(found["turned"]))


def stored_name(name: str) -> str:
    """Return the tensor's name in a file: the stack of an entry, else the name itself."""
    entry = StackEntry.from_name(name)
    return name if entry is None else entry.stack


def stack_sizes(names: Iterable[str]) -> dict[str, int]:
    """Return the number of entries of each stack."""
    found: dict[str, int] = {}
    for entry in map(StackEntry.from_name, names):
        if entry is not None:
            found[entry.stack] = max(found.get(entry.stack, 0), entry.number + 1)
    return found


def stack_entries(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combine entries into stacks; other tensors are unchanged."""
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if (entry := StackEntry.from_name(name)) is None:
            whole[name] = tensor
        else:
            own = parts.setdefault(entry.stack, {})
            own[entry.number] = tensor.T if entry.is_transposed else tensor
    return whole | {
        stack: torch.stack([own[number] for number in sorted(own)]) for stack, own in parts.items()
    }
