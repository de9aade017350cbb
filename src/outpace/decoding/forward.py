"""`Forward`, the input of one sequence to one model in one pass, and its `Prediction`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.processor import attach_top_tokens
from outpace.decoding.sampling import GREEDY, Read, Score
from outpace.decoding.tree import Tree

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

Pattern = Literal["causal", "full"] | tuple[int, ...] | Tree
"""CAUSAL, FULL, the lengths of consecutive blocks (each row sees its block), or a tree."""

CAUSAL: Pattern = "causal"
FULL: Pattern = "full"


def shift_numbers(numbers: Sequence[int], by: int) -> Sequence[int]:
    """Add `by` to each number; a range stays a range, which costs nothing."""
    if isinstance(numbers, range):
        return range(numbers.start + by, numbers.stop + by, numbers.step)
    return [number + by for number in numbers]


@dataclass(slots=True, kw_only=True)
class Forward:
    """Input of one sequence to one model in one forward pass: a write, then a read.

    The n rows are stored in slots `start … start + n - 1`. Then every row reads the slots below its
    visible end. There is no commit and no rollback: to keep what was written, start the next
    forward later; to discard it, start earlier.
    """

    ids: Sequence[int]
    """The n token ids, in slot order."""
    start: int
    """Row i is stored in slot `start + i`."""
    pattern: Pattern = CAUSAL
    """Which of these rows each row sees."""
    positions: Sequence[int] | None = None
    """Rotary positions; `start, start + 1, …` by default."""
    visible_end: int | None = None
    """First slot that the last block of a FULL or block pattern does not see; `start + n` by
    default."""
    predict: Sequence[int] | None = None
    """Slots whose tokens are wanted; the one after the last row by default."""
    predict_from: Sequence[int] | None = None
    """For each of them, the slot that holds the row which predicts it; by default the one given by
    the model's shift."""
    read: Read = GREEDY
    """How logits become tokens and scores."""
    model: str = "target"
    """Role of the model that runs it."""
    context: Tensor | None = None
    """`[c, f]` features of the target for the slots `start - c … start - 1` of a draft; their
    positions are their slots."""
    features: Tensor | None = None
    """`[n, f]` of the target, or `[n, dim]` of the draft itself, which an EAGLE or fused draft
    combines with the tokens, row by row."""
    features_for: str | None = None
    """Role of the draft that needs the hidden states of these rows, if any."""
    branches: Sequence[Sequence[int]] | None = None
    """For each wanted slot, the tokens proposed between the text and it, where the rows are not the
    text in order."""
    first_slot: int = field(init=False, repr=False)
    """First slot that is written, context included."""
    end: int = field(init=False, repr=False)
    """First slot after the rows."""
    num_visible: int = field(init=False, repr=False)
    """Number of slots that the last row sees."""

    def __post_init__(self) -> None:
        self.end = self.start + len(self.ids)
        self.first_slot = self.start if self.context is None else self.start - self.context.shape[0]
        self.num_visible = (
            self.end if self.visible_end is None or self.pattern == CAUSAL else self.visible_end
        )

    def visible_ends(self) -> list[int]:
        """Return the first slot that each row does not see."""
        if self.pattern == CAUSAL:
            return list(range(self.start + 1, self.end + 1))
        if self.pattern == FULL:
            return [self.num_visible] * len(self.ids)
        if isinstance(self.pattern, Tree):
            return self.pattern.visible_ends(self.start)
        assert not isinstance(self.pattern, str)
        ends = [*accumulate(self.pattern, initial=self.start)][1:-1]
        sizes = zip([*ends, self.num_visible], self.pattern, strict=True)
        return [end for end, size in sizes for _ in range(size)]

    def merge_text(self, ids: Sequence[int]) -> list[int]:
        """Return the text from slot 0 on, with the rows of this forward in their slots."""
        if self.branches is not None:
            return list(ids)
        rows: Sequence[int] = self.ids
        if self.positions is not None:
            rows = [token for _, token in sorted(zip(self.positions, self.ids, strict=True))]
        return [*ids[: self.start], *rows, *ids[self.end :]]

    def predicted_rows(self, shift: int) -> Sequence[int]:
        """Return the rows whose logits predict the wanted slots.

        Args:
            shift: shift of the model: 1 where row p - 1 predicts slot p, else 0.

        Raises:
            ValueError: the row of a slot is not in the forward; names both.
        """
        count = len(self.ids)
        if self.predict is None and self.predict_from is None:
            if shift != 1:
                raise ValueError(
                    "predict=None means the slot after the last row, which only a model with "
                    "shift 1 predicts: list the slots"
                )
            return range(count - 1, count)
        wanted, first = self.predicted_slots(), self.start
        if self.predict_from is None:
            rows = shift_numbers(wanted, -shift - first)
        else:
            rows = shift_numbers(self.predict_from, -first)
        if len(rows) != len(wanted):
            raise ValueError(f"predict_from has {len(rows)} rows for {len(wanted)} wanted slots")
        ends = (rows[0], rows[-1]) if rows and isinstance(rows, range) else rows
        if len(ends) and (min(ends) < 0 or max(ends) >= count):
            bad = next(i for i, row in enumerate(rows) if not 0 <= row < count)
            raise ValueError(
                f"slot {wanted[bad]} is predicted by the row of slot {first + rows[bad]}, "
                f"but this forward holds slots {first} to {self.end - 1}"
            )
        return rows

    def predicted_slots(self) -> Sequence[int]:
        """Return the wanted slots."""
        return (self.end,) if self.predict is None else self.predict

    def check_bounds(
        self,
        *,
        vocab: int,
        length: int,
        slots: int,
        written: int,
        feature_size: int = 0,
        widths: tuple[int, ...] = (),
    ) -> None:
        """Check that a model can run this forward.

        Args:
            vocab: vocabulary size of the model.
            length: context length of the model.
            slots: slots reserved for the sequence.
            written: slots of the sequence that have been written.
            feature_size: width of the context that the model reads.
            widths: allowed widths of the features that the model combines with its rows.

        Raises:
            ValueError: the model cannot run the forward.
            TypeError: an entry is not a whole number.
        """
        if not len(self.ids):
            raise ValueError("a forward needs at least one row")
        if min(self.ids) < 0 or max(self.ids) >= vocab:
            bad = next(token for token in self.ids if not 0 <= token < vocab)
            raise ValueError(f"token id {bad} is outside the vocabulary of {vocab}")
        end, seen = index(self.start) + len(self.ids), index(self.num_visible)
        if not 0 <= self.first_slot <= written:
            raise ValueError(
                f"rows start at slot {self.first_slot}, but only {written} slots have been written"
            )
        if end > slots:
            raise ValueError(f"rows end at slot {end - 1}, but {slots} slots were reserved")
        if seen > max(written, end):
            raise ValueError(f"visible_end {self.visible_end} has slots that were never written")
        if seen < end:
            raise ValueError(f"visible_end {self.visible_end} hides rows up to slot {end - 1}")
        if self.context is not None and self.context.shape[-1] != feature_size:
            raise ValueError(
                f"the context is {self.context.shape[-1]} wide, "
                f"but {self.model} reads {feature_size}"
            )
        self.check_features(widths)
        if not isinstance(self.read, Read):
            raise ValueError(f"read must be a Read, such as request.sample(), got {self.read!r}")
        if self.positions is not None:
            self.check_positions(self.positions, length)
        if isinstance(self.pattern, Tree):
            if self.visible_end is not None:
                raise ValueError(f"visible_end must be None for a tree, got {self.visible_end}")
            self.pattern.check_rows(self.start, len(self.ids))
        elif self.pattern != CAUSAL and self.pattern != FULL:
            self.check_blocks(self.pattern)

    def check_features(self, widths: tuple[int, ...]) -> None:
        shape = None if self.features is None else tuple(self.features.shape)
        fits = [(len(self.ids), width) for width in widths]
        if shape not in fits if fits else shape is not None:
            wide = " or ".join(map(str, widths)) or "none"
            raise ValueError(
                f"features are {shape} for {len(self.ids)} rows, but {self.model} needs {wide}"
            )
        if self.branches is None:
            return
        if len(self.branches) != (wanted := len(self.predicted_slots())):
            raise ValueError(f"{len(self.branches)} branches for {wanted} wanted slots")

    def check_positions(self, positions: Sequence[int], length: int) -> None:
        if len(positions) != len(self.ids):
            raise ValueError(f"{len(positions)} positions for {len(self.ids)} rows")
        if min(positions) < 0 or max(positions) >= length:
            bad = next(position for position in positions if not 0 <= position < length)
            raise ValueError(f"position {bad} is outside the model's context length of {length}")

    def check_blocks(self, lengths: object) -> None:
        """Raise `ValueError` for an invalid pattern, or blocks that do not match the rows."""
        if not isinstance(lengths, tuple):
            raise ValueError(
                f"pattern must be CAUSAL, FULL, a Tree or lengths of blocks, got {lengths!r}"
            )
        if sum(map(index, lengths)) != len(self.ids) or min(lengths) < 1:
            raise ValueError(
                f"block lengths {lengths} do not add up to {len(self.ids)} rows, "
                "or one is not positive"
            )


@dataclass(slots=True, kw_only=True)
class Prediction:
    """Result of a forward: one entry for each of the r wanted slots."""

    tokens: list[int]
    """`[r]` token ids, on the host."""
    scores: Mapping[Score, FloatArray] = field(default_factory=dict)
    """`f32[r]` on the host for each score that the read requests."""
    top: np.ndarray[Any, np.dtype[np.float64]] | None = None
    """Ids and log-probabilities of the most probable tokens, `f64[2, count, r]` on the host, where
    the request asks for them."""
    logits: Tensor | None = None
    """`[r, vocab]` on the device, where the read keeps them."""
    features: Tensor | None = None
    """`[n, f]` on the device: hidden states of all n rows, where the forward requests them."""

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probabilities of the tokens, where the request asks for them."""
        if "logprob" not in self.scores:
            return None
        found: list[float] = self.scores["logprob"].tolist()
        return found if self.top is None else attach_top_tokens(found, self.top)


Decoding = Generator[Forward, Prediction, None]
