"""Rows of one forward pass as an attention back end receives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.tree import Tree
from outpace.models.attention import Attend


class SequencePages(Protocol):
    """Physical memory of the slots of one sequence."""

    @property
    def slots(self) -> NDArray[np.int64]:
        """Physical slot of each slot."""
        ...


@dataclass(slots=True)
class RowSpan:
    """Rows of one sequence in a pass."""

    rows: slice
    """Range of these rows among all rows of the pass."""
    start: int
    num_visible: int
    """Number of slots visible to the last row."""
    visible_ends: list[int] | None
    """End of the visible slots of each row, exclusive; None for causal rows, which see the slots up
    to their own."""
    pages: SequencePages
    """Memory of the sequence."""
    tree: Tree | None = None
    """Ancestor masks of draft rows; each of these rows also sees its own slot. None without a tree.
    """
    settled: int = 0
    """Slot before which no later forward of the sequence starts."""

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def row_visible_ends(self) -> Sequence[int]:
        """End of the visible slots of each row, exclusive."""
        return (
            range(self.start + 1, self.start + len(self) + 1)
            if self.visible_ends is None
            else self.visible_ends
        )


@dataclass(slots=True)
class AttentionBatch:
    """T concatenated rows of many sequences, and the C rows of their context."""

    ids: Tensor
    """Token ids, `i64[T]`."""
    positions: Tensor
    """Rotary positions, `i64[T]`."""
    write_slots: Tensor
    """Physical slots to write, `i64[C + T]`, context first."""
    context: tuple[Tensor, Tensor] | None
    """Features `[C, f]` and their positions `i64[C]`; None without context."""
    spans: list[RowSpan]
    """The rows of each sequence and their visible slots."""
    _: KW_ONLY
    features: Sequence[Tensor] = ()
    """`[n, f]` for each span whose rows take features as input; widths may differ."""
    plan_arrays: Sequence[Tensor] = ()
    """Arrays that the back end needs on the device, each `i64[…]`."""


class Backend(Protocol):
    """Attention over the cache of one model on one device."""

    @property
    def num_arrays(self) -> int:
        """Number of arrays of a pass; a pass that needs none has none."""
        ...

    def plan_arrays(self, spans: Sequence[RowSpan]) -> Sequence[NDArray[np.int64]]:
        """Return the flat arrays to copy to the device together with a batch of these spans."""
        ...

    def plan_pass(self, batch: AttentionBatch) -> Attend:
        """Do the work that all layers of a pass share; return the `attend` of its layers."""
        ...
