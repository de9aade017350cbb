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

    pages: list[int]
    """Physical pages, in the order of their slots."""

    first: int | None
    """Physical slot of slot 0 if the sequence is contiguous, else None."""

    stride: int
    """Alignment of contiguous sequences of this size, in slots; 0 if the pages are scattered."""

    def physical_slots(self, end: int) -> slice | NDArray[np.int64]:
        """Return the physical slots below slot `end`, as a slice if they are contiguous."""
        ...


@dataclass(slots=True)
class RowSpan:
    """Rows of one sequence in a pass.

    Attributes:
        rows: range of these rows among all rows of the pass.
        start: slot of the first row.
        num_visible: number of slots visible to the last row.
        visible_ends: end of the visible slots of each row, exclusive; None for causal rows,
            which see the slots up to their own.
        pages: memory of the sequence.
        tree: ancestor masks of draft rows; each of these rows also sees its own slot. None
            without a tree.
        settled: slot before which no later forward of the sequence starts.
    """

    rows: slice
    start: int
    num_visible: int
    visible_ends: list[int] | None
    pages: SequencePages
    tree: Tree | None = None
    settled: int = 0

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
    """T concatenated rows of many sequences, and the C rows of their context.

    Attributes:
        ids: token ids, `i64[T]`.
        positions: rotary positions, `i64[T]`.
        write_slots: physical slots to write, `i64[C + T]`, context first.
        context: features `[C, f]` and their positions `i64[C]`; None without context.
        spans: the rows of each sequence and their visible slots.
        features: `[n, f]` for each span whose rows take features as input; widths may differ.
        plan_arrays: arrays that the back end needs on the device, each `i64[…]`.
    """

    ids: Tensor
    positions: Tensor
    write_slots: Tensor
    context: tuple[Tensor, Tensor] | None
    spans: list[RowSpan]
    _: KW_ONLY
    features: Sequence[Tensor] = ()
    plan_arrays: Sequence[Tensor] = ()


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
