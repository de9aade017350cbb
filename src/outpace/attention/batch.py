"""What a pass feeds, as attention needs it: rows of many sequences, and what they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.tree import Tree
from outpace.models.transformer import Attend


class Pages(Protocol):
    """Where the slots of one sequence lie in memory."""

    pages: list[int]
    """Physical pages, in the order of the slots that they hold."""

    first: int | None
    """Physical slot of slot 0, where they lie side by side."""

    stride: int
    """Slots by whose multiples contiguous sequences of this size begin; 0 where pages scatter."""

    def window(self, end: int) -> slice | NDArray[np.int64]:
        """Physical slots below slot `end`; a slice where they lie side by side."""
        ...


@dataclass(slots=True)
class Span:
    """The rows of one sequence in a pass.

    Attributes:
        rows: their place among all rows.
        start: slot of the first of them.
        seen: number of slots that the last of them sees.
        stops: first slot that each of them does not see; None where that is one behind its own
            (causal rows).
        pages: the sequence's memory.
        tree: what some of them see besides, each its own slot among it; None for most.
    """

    rows: slice
    start: int
    seen: int
    stops: list[int] | None
    pages: Pages
    tree: Tree | None = None

    def __len__(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def stop_of_rows(self) -> Sequence[int]:
        """First slot that each row does not see."""
        return (
            range(self.start + 1, self.start + len(self) + 1) if self.stops is None else self.stops
        )


@dataclass(slots=True)
class Batch:
    """T rows of many sequences, one behind the other, and the C rows of their context.

    Attributes:
        ids: `i64[T]` token ids.
        positions: `i64[T]` rotary positions.
        write: `i64[C + T]` physical slots, those of the context first.
        context: `[C, f]` features and their positions `i64[C]`; None where there are none.
        spans: what each sequence feeds and sees.
        features: `[n, f]` of each span, where its rows take them in; their widths may differ.
        numbers: what the back end wants on the device besides, each `i64[…]`.
    """

    ids: Tensor
    positions: Tensor
    write: Tensor
    context: tuple[Tensor, Tensor] | None
    spans: list[Span]
    _: KW_ONLY
    features: Sequence[Tensor] = ()
    numbers: Sequence[Tensor] = ()


class Backend(Protocol):
    """Attention over the cache of one model, on some device."""

    def numbers(self, spans: Sequence[Span]) -> Sequence[NDArray[np.int64]]:
        """Flat numbers that shall go to the device with a batch of these spans."""
        ...

    def plan(self, batch: Batch) -> Attend:
        """What is the same in every layer is done here, once per pass."""
        ...
