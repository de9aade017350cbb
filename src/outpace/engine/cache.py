"""The memory of one model: pages of key/value slots, and a table of them for each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outpace.models.config import ModelConfig

PAGE = 16


@dataclass(slots=True, kw_only=True)
class Table:
    """The pages of one sequence in one cache.

    Attributes:
        pages: physical pages, in the order of the slots they hold.
        size: number of slots reserved.
        slots: `i64[size]` physical slot of each slot.
        contiguous: whether the pages lie one behind the other.
        written: number of slots that have ever been written.
    """

    pages: list[int]
    size: int
    slots: NDArray[np.int64]
    contiguous: bool
    written: int = 0

    def window(self, end: int) -> slice | NDArray[np.int64]:
        """Physical slots below slot `end`; a slice, and so a view, where pages are contiguous."""
        if self.contiguous:
            first = int(self.slots[0])
            return slice(first, first + end)
        return self.slots[:end]


class Cache:
    """Keys and values of one model, `[slots, kv_heads, head_dim]` a layer, handed out in pages."""

    def __init__(
        self, config: ModelConfig, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages = -(-slots // PAGE)
        shape = (2, config.layers, self.num_pages * PAGE, config.kv_heads, config.head_dim)
        self.memory: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.keys, self.values = (list(half) for half in self.memory)
        self.free = np.ones(self.num_pages, dtype=bool)

    def __len__(self) -> int:
        return self.num_pages * PAGE

    def reserve(self, slots: int) -> Table | None:
        """A table with room for `slots`, contiguous if possible; None where memory is short."""
        count = -(-slots // PAGE)
        free = np.flatnonzero(self.free)
        if len(free) < count:
            return None
        runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        first = runs[0] if len(runs) else 0
        pages = free[first : first + count]
        self.free[pages] = False
        places = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()[:slots]
        return Table(pages=pages.tolist(), size=slots, slots=places, contiguous=len(runs) > 0)

    def release(self, table: Table) -> None:
        """Give the pages of a table back."""
        self.free[table.pages] = True


def cache_slots(config: ModelConfig, dtype: torch.dtype, budget: int) -> int:
    """Number of slots that fit into `budget` bytes."""
    return budget // (2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize)
