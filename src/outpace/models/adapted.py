"""Low-rank adapters beside the base weights: each row of a pass has its own adapter, or none.

The rows of one adapter are multiplied together, in products that are batch invariant where those of
the base are. A row's result therefore does not depend on the other adapters of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.kernels.matmul import LAYOUTS, bind_product, choose_layout
from outpace.kernels.tiles import TILE_OUTPUTS, RowProduct
from outpace.models.packed import DenseState
from outpace.models.replacement import Replacement

RowGroup = tuple[str, slice | Tensor]
"""An adapter, and its rows of a pass: a slice, or indices `i64[n]`."""


@dataclass(frozen=True, slots=True)
class OutputUpdate:
    """A low-rank update of some outputs of a linear layer, which adds `up @ down` to its matrix."""

    outputs: slice
    """The outputs that it updates."""
    down: Tensor
    """`[rank, in]`."""
    up: Tensor
    """`[out, rank]`, with the scale of the adapter."""


ModelUpdates = Mapping[str, Sequence[OutputUpdate]]
"""The updates of one adapter, by name of the linear layer."""


class AdapterRows:
    """The adapter of each row of the current pass, which all adapted layers of a model read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.assign_runs(())

    def assign_runs(self, counts: Iterable[tuple[str | None, int]]) -> None:
        """Set the adapter of all rows, given for each number of consecutive rows."""
        self.runs: list[tuple[str, int, int]] = []
        """Consecutive rows with one adapter: its name, their begin and end."""
        self.groups: dict[tuple[int, int], list[RowGroup]] = {}
        self.begin = end = 0
        """Row of the pass that is the first one of a layer's input."""
        for name, count in counts:
            if name is not None:
                self.runs.append((name, end, end + count))
            end += count

    def split_rows(self, x: Tensor, size: int) -> Iterator[Tensor]:
        """Yield consecutive rows of the input of a layer, at most `size` at a time."""
        for self.begin in range(0, len(x), size):
            yield x[self.begin : self.begin + size]
        self.begin = 0

    def find_groups(self, count: int) -> list[RowGroup]:
        if not self.runs:
            return []
        key = self.begin, count
        if key not in self.groups:
            ranges: dict[str, list[range]] = {}
            for name, begin, end in self.runs:
                first, last = max(begin - self.begin, 0), min(end - self.begin, count)
                if first < last:
                    ranges.setdefault(name, []).append(range(first, last))
            self.groups[key] = [(name, self.join_ranges(each)) for name, each in ranges.items()]
        return self.groups[key]

    def join_ranges(self, ranges: Sequence[range]) -> slice | Tensor:
        begin, end = ranges[0].start, ranges[-1].stop
        if end - begin == sum(map(len, ranges)):
            return slice(begin, end)
        return torch.tensor([row for each in ranges for row in each], device=self.device)


class AdaptedLinear(Replacement, nn.Linear, DenseState):
    """A linear layer of any weight format, with the updates of adapters for their rows."""

    def __init__(self, linear: nn.Linear, rows: AdapterRows) -> None:
        super().__init__(linear)
        self.rows = rows
        self.products: dict[str, list[tuple[slice, RowProduct, RowProduct]]] = {}

    def add_adapter(self, name: str, updates: Sequence[OutputUpdate]) -> None:
        self.products[name] = [
            (update.outputs, *bind_update(update, self.rows.device)) for update in updates
        ]

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.original[0](x)
        for name, rows in self.rows.find_groups(len(x)):
            for outputs, multiply_down, multiply_up in self.products.get(name, ()):
                delta = multiply_up(multiply_down(x[rows]))
                if isinstance(rows, slice):
                    y[rows, outputs].add_(delta)
                else:
                    y[rows, outputs] += delta
        return y

    def dense_weight(self) -> Tensor:
        linear = self.original[0]
        return linear.dense_weight() if isinstance(linear, DenseState) else self.weight


def bind_update(update: OutputUpdate, device: torch.device) -> tuple[RowProduct, RowProduct]:
    padding = -len(update.down) % TILE_OUTPUTS  # zeros, which change no sum
    down, up = F.pad(update.down, (0, 0, 0, padding)), F.pad(update.up, (0, padding))
    return bind_matrix(down.to(device)), bind_matrix(up.to(device))


def bind_matrix(weight: Tensor) -> RowProduct:
    if weight.device.type != "cpu":
        return partial(F.linear, weight=weight)
    return bind_product(LAYOUTS[choose_layout(weight)](weight))
