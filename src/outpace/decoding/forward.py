"""What a method gives a model in one pass, and what comes back."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outpace.decoding.sampling import GREEDY, Read

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

Mask = Literal["causal", "full"] | tuple[int, ...]
"""CAUSAL, FULL, or the lengths of consecutive blocks: each row sees to the end of its block."""

CAUSAL: Mask = "causal"
FULL: Mask = "full"


@dataclass(slots=True, kw_only=True)
class Forward:
    """What one sequence gives one model in one forward pass: a write, then a read.

    The n rows are stored in slots `start … start + n - 1`; then every row reads the slots below
    its stop. There is no commit and no rollback: to keep what was written, start the next forward
    later; to discard it, start earlier.

    Attributes:
        ids: n token ids, in slot order.
        start: row i is stored in slot `start + i`.
        mask: what rows see of each other.
        positions: rotary positions; `start, start + 1, …` by default.
        reach: slots that the last block of a FULL or block mask sees; `start + n` by default.
        predict: slots whose tokens are wanted; the one after the last row by default.
        rows: for each of them, the slot that holds the row which predicts it; by default the one
            that the model's shift names.
        read: how logits become tokens and scores.
        model: role of the model that runs it.
        context: `[c, f]` features of the target that fill the slots `start - c … start - 1` of a
            draft; their positions are their slots.
        features: role of the draft that wants the hidden states of these rows, if one does.
    """

    ids: Sequence[int]
    start: int
    mask: Mask = CAUSAL
    positions: Sequence[int] | None = None
    reach: int | None = None
    predict: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    read: Read = GREEDY
    model: str = "target"
    context: Tensor | None = None
    features: str | None = None

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
        return self.end if self.reach is None or self.mask == CAUSAL else self.reach

    def stops(self) -> IntArray:
        """First slot that each row does not see, `i64[n]`."""
        if self.mask == CAUSAL:
            return np.arange(self.start + 1, self.end + 1)
        if self.mask == FULL:
            return np.full(len(self.ids), self.seen)
        assert not isinstance(self.mask, str)
        ends = self.start + np.cumsum(self.mask)
        ends[-1] = self.seen
        return np.repeat(ends, self.mask)

    def predicted_rows(self, shift: int) -> IntArray:
        """Rows whose logits predict the wanted slots, for a model of this shift.

        Raises `ValueError` naming slot and row where the row is not in the forward.
        """
        if self.predict is None and self.rows is None:
            if not shift:
                raise ValueError(
                    "predict=None asks for the slot after the last row, which only a model with "
                    "shift 1 predicts; name the slots"
                )
            return np.array([len(self.ids) - 1])
        slots = self.predicted_slots()
        wanted = np.fromiter(slots, np.int64, len(slots))
        held = wanted - shift if self.rows is None else np.asarray(self.rows, dtype=np.int64)
        if len(held) != len(wanted):
            raise ValueError(f"{len(held)} rows are named for {len(wanted)} wanted slots")
        rows: IntArray = held - self.start
        if rows.size and (rows.min() < 0 or rows.max() >= len(self.ids)):
            bad = next(i for i, row in enumerate(rows) if not 0 <= row < len(self.ids))
            raise ValueError(
                f"slot {wanted[bad]} is predicted by the row of slot {held[bad]}, "
                f"but this forward holds slots {self.start} to {self.end - 1}"
            )
        return rows

    def predicted_slots(self) -> Sequence[int]:
        """The wanted slots."""
        return (self.end,) if self.predict is None else self.predict

    def holes(self, mask_id: int, first: int) -> tuple[range, ...]:
        """Runs of slots, from slot `first` on, that are fed as masks, wherever their rows lie."""
        places = range(self.start, self.end) if self.positions is None else self.positions
        masked = (p for p, token in zip(places, self.ids, strict=True) if token == mask_id)
        runs: list[range] = []
        for slot in sorted(place for place in masked if place >= first):
            if runs and slot == runs[-1].stop:
                runs[-1] = range(runs[-1].start, slot + 1)
            else:
                runs.append(range(slot, slot + 1))
        return tuple(runs)

    def check(
        self, *, vocab: int, length: int, slots: int, written: int, features: int = 0
    ) -> None:
        """Raise `ValueError` for what a model cannot run.

        `vocab`, `length` and `features` (width of the context that it reads) are the model's,
        `slots` is the room of the sequence, `written` how far it has been filled.
        """
        if not self.ids:
            raise ValueError("a forward needs at least one row")
        if min(self.ids) < 0 or max(self.ids) >= vocab:
            bad = next(token for token in self.ids if not 0 <= token < vocab)
            raise ValueError(f"token id {bad} lies outside the vocabulary of {vocab}")
        if not 0 <= self.first <= written:
            raise ValueError(
                f"rows start at slot {self.first}, but only {written} slots have been written"
            )
        if self.end > slots:
            raise ValueError(f"rows end at slot {self.end - 1}, but {slots} slots were reserved")
        if self.seen > max(written, self.end):
            raise ValueError(f"reach {self.reach} reads slots that were never written")
        if self.seen < self.end:
            raise ValueError(f"reach {self.reach} hides rows, which end at slot {self.end - 1}")
        if self.context is not None and self.context.shape[-1] != features:
            raise ValueError(
                f"the context is {self.context.shape[-1]} wide, but {self.model} reads {features}"
            )
        self._check_rows(length)

    def _check_rows(self, length: int) -> None:
        """Raise `ValueError` where positions or block lengths do not fit the rows."""
        if self.positions is not None:
            if len(self.positions) != len(self.ids):
                raise ValueError(f"{len(self.positions)} positions for {len(self.ids)} rows")
            if min(self.positions) < 0 or max(self.positions) >= length:
                bad = next(place for place in self.positions if not 0 <= place < length)
                raise ValueError(f"position {bad} lies outside the model's length of {length}")
        if not isinstance(self.mask, str) and (
            sum(self.mask) != len(self.ids) or min(self.mask) < 1
        ):
            raise ValueError(
                f"block lengths {self.mask} do not add up to {len(self.ids)} rows, "
                "or one is not positive"
            )


@dataclass(slots=True, kw_only=True)
class Prediction:
    """What comes back: one entry for each of the r slots that were asked for.

    Attributes:
        tokens: `[r]` token ids, on the host.
        confidence, entropy, margin: `f32[r]` on the host, where the read asks for them:
            probability of the token, entropy in nats, lead of the most probable token.
        logits: `[r, vocab]` on the device, where the read keeps them.
        features: `[n, f]` on the device: hidden states of all n rows, where the forward asks.
    """

    tokens: list[int]
    confidence: FloatArray | None = None
    entropy: FloatArray | None = None
    margin: FloatArray | None = None
    logits: Tensor | None = None
    features: Tensor | None = None


Decoding = Generator[Forward, Prediction, None]
