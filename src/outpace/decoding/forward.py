"""What a method gives a model in one pass, and what comes back."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import index
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.sampling import GREEDY, Read, Score
from outpace.decoding.tree import Tree

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

Pattern = Literal["causal", "full"] | tuple[int, ...] | Tree
"""CAUSAL, FULL, the lengths of consecutive blocks, to whose end each row sees, or a tree."""

CAUSAL: Pattern = "causal"
FULL: Pattern = "full"


def moved(numbers: Sequence[int], by: int) -> Sequence[int]:
    """Numbers with another added to each; a range stays one, which costs nothing."""
    if isinstance(numbers, range):
        return range(numbers.start + by, numbers.stop + by, numbers.step)
    return [number + by for number in numbers]


@dataclass(slots=True, kw_only=True)
class Forward:
    """What one sequence gives one model in one forward pass: a write, then a read.

    The n rows are stored in slots `start … start + n - 1`; then every row reads the slots below
    its stop. There is no commit and no rollback: to keep what was written, start the next forward
    later; to discard it, start earlier.

    Attributes:
        ids: n token ids, in slot order.
        start: row i is stored in slot `start + i`.
        pattern: what rows see of each other.
        positions: rotary positions; `start, start + 1, …` by default.
        reach: slots that the last block of a FULL or block pattern sees; `start + n` by default.
        predict: slots whose tokens are wanted; the one after the last row by default.
        predict_from: for each of them, the slot that holds the row which predicts it; by default
            the one that the model's shift names.
        read: how logits become tokens and scores.
        model: role of the model that runs it.
        context: `[c, f]` features of the target that fill the slots `start - c … start - 1` of a
            draft; their positions are their slots.
        features: `[n, f]` of the target, or `[n, dim]` of the draft itself, that a draft which
            extends them takes in with the tokens, row by row.
        features_for: role of the draft that wants the hidden states of these rows, if one does.
        branches: for each wanted slot, what is proposed between the text and it, where rows are
            not the text in its order.
    """

    ids: Sequence[int]
    start: int
    pattern: Pattern = CAUSAL
    positions: Sequence[int] | None = None
    reach: int | None = None
    predict: Sequence[int] | None = None
    predict_from: Sequence[int] | None = None
    read: Read = GREEDY
    model: str = "target"
    context: Tensor | None = None
    features: Tensor | None = None
    features_for: str | None = None
    branches: Sequence[Sequence[int]] | None = None

    @property
    def first(self) -> int:
        """First slot that is written."""
        return self.start if self.context is None else self.start - self.context.shape[0]

    @property
    def end(self) -> int:
        """First slot behind the rows."""
        return self.start + len(self.ids)

    @property
    def seen(self) -> int:
        """Number of slots that the last row sees."""
        if self.reach is None or self.pattern == CAUSAL:
            return self.start + len(self.ids)
        return self.reach

    def stops(self) -> list[int]:
        """First slot that each row does not see."""
        if self.pattern == CAUSAL:
            return list(range(self.start + 1, self.end + 1))
        if self.pattern == FULL:
            return [self.seen] * len(self.ids)
        if isinstance(self.pattern, Tree):
            return self.pattern.stops(self.start)
        assert not isinstance(self.pattern, str)
        ends = [*accumulate(self.pattern, initial=self.start)][1:-1]
        sizes = zip([*ends, self.seen], self.pattern, strict=True)
        return [end for end, size in sizes for _ in range(size)]

    def known(self, ids: Sequence[int]) -> list[int]:
        """The text from slot 0 on, as this forward knows it: its own ids among those of a text."""
        if self.branches is not None:
            return list(ids)
        own: Sequence[int] = self.ids
        if self.positions is not None:
            own = [token for _, token in sorted(zip(self.positions, self.ids, strict=True))]
        return [*ids[: self.start], *own, *ids[self.end :]]

    def predicted_rows(self, shift: int) -> Sequence[int]:
        """Rows whose logits predict the wanted slots, for a model of this shift.

        Raises `ValueError` naming slot and row where the row is not in the forward.
        """
        count = len(self.ids)
        if self.predict is None and self.predict_from is None:
            if shift != 1:
                raise ValueError(
                    "predict=None asks for the slot after the last row, which only a model with "
                    "shift 1 predicts; name the slots"
                )
            return range(count - 1, count)
        wanted, first = self.predicted_slots(), self.start
        if self.predict_from is None:
            rows = moved(wanted, -shift - first)
        else:
            rows = moved(self.predict_from, -first)
        if len(rows) != len(wanted):
            raise ValueError(f"{len(rows)} rows are named for {len(wanted)} wanted slots")
        ends = (rows[0], rows[-1]) if rows and isinstance(rows, range) else rows
        if len(ends) and (min(ends) < 0 or max(ends) >= count):
            bad = next(i for i, row in enumerate(rows) if not 0 <= row < count)
            raise ValueError(
                f"slot {wanted[bad]} is predicted by the row of slot {first + rows[bad]}, "
                f"but this forward holds slots {first} to {self.end - 1}"
            )
        return rows

    def predicted_slots(self) -> Sequence[int]:
        """The wanted slots."""
        return (self.end,) if self.predict is None else self.predict

    def check(
        self,
        *,
        vocab: int,
        length: int,
        slots: int,
        written: int,
        feature_size: int = 0,
        widths: tuple[int, ...] = (),
    ) -> None:
        """Raise `ValueError` for what a model cannot run, `TypeError` for what is no number.

        `vocab`, `length`, `feature_size` (width of the context that it reads) and `widths` (of the
        features that it takes in with its rows) are the model's, `slots` is the room of the
        sequence, `written` how far it has been filled.
        """
        if not len(self.ids):
            raise ValueError("a forward needs at least one row")
        if min(self.ids) < 0 or max(self.ids) >= vocab:
            bad = next(token for token in self.ids if not 0 <= token < vocab)
            raise ValueError(f"token id {bad} lies outside the vocabulary of {vocab}")
        end, seen = index(self.start) + len(self.ids), index(self.seen)
        if not 0 <= self.first <= written:
            raise ValueError(
                f"rows start at slot {self.first}, but only {written} slots have been written"
            )
        if end > slots:
            raise ValueError(f"rows end at slot {end - 1}, but {slots} slots were reserved")
        if seen > max(written, end):
            raise ValueError(f"reach {self.reach} reads slots that were never written")
        if seen < end:
            raise ValueError(f"reach {self.reach} hides rows, which end at slot {end - 1}")
        if self.context is not None and self.context.shape[-1] != feature_size:
            raise ValueError(
                f"the context is {self.context.shape[-1]} wide, "
                f"but {self.model} reads {feature_size}"
            )
        self.check_features(widths)
        if not isinstance(self.read, Read):
            raise ValueError(f"read must be a Read, such as request.sample(), not {self.read!r}")
        if self.positions is not None:
            self.check_positions(self.positions, length)
        if isinstance(self.pattern, Tree):
            self.check_tree(self.pattern)
        elif self.pattern != CAUSAL and self.pattern != FULL:
            self.check_blocks(self.pattern)

    def check_features(self, widths: tuple[int, ...]) -> None:
        """Raise `ValueError` where features, or branches, are not those of the rows."""
        given = None if self.features is None else tuple(self.features.shape)
        fits = [(len(self.ids), width) for width in widths]
        if given not in fits if fits else given is not None:
            wide = " or ".join(map(str, widths)) or "none"
            raise ValueError(
                f"features are {given} for {len(self.ids)} rows, but {self.model} takes in {wide}"
            )
        if self.branches is None:
            return
        if len(self.branches) != (wanted := len(self.predicted_slots())):
            raise ValueError(f"{len(self.branches)} branches for {wanted} wanted slots")

    def check_tree(self, tree: Tree) -> None:
        """Raise `ValueError` where a tree does not fit the rows, or has a reach."""
        if self.reach is not None:
            raise ValueError(f"a tree has no reach, but {self.reach} is given")
        tree.check(self.start, len(self.ids))

    def check_positions(self, positions: Sequence[int], length: int) -> None:
        """Raise `ValueError` where positions do not fit the rows, or the model."""
        if len(positions) != len(self.ids):
            raise ValueError(f"{len(positions)} positions for {len(self.ids)} rows")
        if min(positions) < 0 or max(positions) >= length:
            bad = next(place for place in positions if not 0 <= place < length)
            raise ValueError(f"position {bad} lies outside the model's length of {length}")

    def check_blocks(self, lengths: object) -> None:
        """Raise `ValueError` where a pattern is none, or its blocks do not fit the rows."""
        if not isinstance(lengths, tuple):
            raise ValueError(
                f"pattern must be CAUSAL, FULL, a Tree or lengths of blocks, not {lengths!r}"
            )
        if sum(map(index, lengths)) != len(self.ids) or min(lengths) < 1:
            raise ValueError(
                f"block lengths {lengths} do not add up to {len(self.ids)} rows, "
                "or one is not positive"
            )


@dataclass(slots=True, kw_only=True)
class Prediction:
    """What comes back: one entry for each of the r slots that were asked for.

    Attributes:
        tokens: `[r]` token ids, on the host.
        scores: `f32[r]` on the host for each score that the read asks for.
        logits: `[r, vocab]` on the device, where the read keeps them.
        features: `[n, f]` on the device: hidden states of all n rows, where the forward asks.
    """

    tokens: list[int]
    scores: Mapping[Score, FloatArray] = field(default_factory=dict)
    logits: Tensor | None = None
    features: Tensor | None = None

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probabilities of the tokens, where the request wants them."""
        return self.scores["logprob"].tolist() if "logprob" in self.scores else None


Decoding = Generator[Forward, Prediction, None]
