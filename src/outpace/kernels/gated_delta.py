"""The gated delta rule (Yang et al., 2025) in PyTorch, in float32.

A layer has H heads, each with a state `S [K, V]`. Row i decays it, and replaces the value under its
key: `S = exp(g) S; u = beta (v - k S); S = S + k u`. It returns `q S`. The corrected values `u` of
n rows follow from the state before them by one triangular solve, so neither the state after each
row nor that after the last one is needed. It is advanced by any number of rows later, in one
product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK_ROWS = 64
"""Rows that are computed together; longer inputs are split."""

KEPT_ROWS = 8
"""Rows after the state that are kept where all of them could be added to it.

To add rows costs a pass over the state, and to keep them costs reading them for every new row.
"""

MIN_DECAY = -1000.0
"""Least logarithm of a decay; its exponential is 0 in float32."""


@dataclass(frozen=True, slots=True)
class DeltaState:
    """State of one layer of one sequence, and the rows after it.

    Attributes:
        start: slot of the first row after the state.
        state: `f32[H, K, V]`.
        inputs: inputs of the convolution, `[c, size]`: those of the slots before `start`, then
            those of the rows.
        keys: keys of the n rows, `f32[H, n, K]`.
        values: their corrected values, `f32[H, n, V]`.
        decay: logarithm of the decay at each row, `f32[H, n]`.
    """

    start: int
    state: Tensor
    inputs: Tensor
    keys: Tensor
    values: Tensor
    decay: Tensor

    @classmethod
    def blank(cls, shape: tuple[int, int, int], inputs: Tensor) -> DeltaState:
        """Return the state before slot 0, for a state's shape `(H, K, V)` and blank inputs."""
        heads, key, value = shape
        state = torch.zeros(shape, device=inputs.device)
        keys, values = state.new_empty(heads, 0, key), state.new_empty(heads, 0, value)
        return cls(0, state, inputs, keys, values, keys.new_empty(heads, 0))

    @property
    def num_rows(self) -> int:
        """Number of rows after the state."""
        return self.decay.shape[1]

    @property
    def end(self) -> int:
        """Slot after the last row."""
        return self.start + self.num_rows

    def rewind(self, slot: int) -> DeltaState:
        """Return the state without the rows from `slot` on."""
        if (count := slot - self.start) == self.num_rows:
            return self
        return replace(
            self,
            inputs=self.inputs[: len(self.inputs) - self.num_rows + count],
            keys=self.keys[:, :count],
            values=self.values[:, :count],
            decay=self.decay[:, :count],
        )

    def advance(self, slot: int) -> DeltaState:
        """Return the state before `slot`, with the rows from there on."""
        if (count := slot - self.start) <= 0:
            return self
        decays = add_decays(self.decay[:, :count])
        total = decays[:, -1:]
        share = (total - decays).exp().float()
        keys = self.keys[:, :count] * share[..., None]
        state = self.state * total.exp().float()[..., None]
        state.baddbmm_(keys.transpose(1, 2), self.values[:, :count])
        return DeltaState(
            slot,
            state,
            self.inputs[count:],
            self.keys[:, count:],
            self.values[:, count:],
            self.decay[:, count:],
        )

    def copy_before(self, slot: int) -> DeltaState:
        """Return the state before `slot`, without the memory of its rows."""
        state = self.advance(slot).rewind(slot)
        rows = {
            name: getattr(state, name).clone() for name in ("inputs", "keys", "values", "decay")
        }
        return replace(state, **rows)

    def convolve(self, inputs: Tensor, weight: Tensor) -> tuple[Tensor, DeltaState]:
        """Return a causal convolution of further rows, and the state with their inputs.

        Args:
            inputs: `[n, size]`.
            weight: `[size, 1, taps]`, for each column its own.

        Returns:
            `f32[n, size]` after SiLU, and the state whose other rows must follow.
        """
        count, taps = len(inputs), weight.shape[-1]
        joined = torch.cat((self.inputs, inputs))
        recent, factors = joined[len(joined) - count - taps + 1 :].float(), weight[:, 0].float().T
        mixed = recent[:count] * factors[0]
        for tap in range(1, taps):
            mixed = mixed.addcmul(recent[tap : tap + count], factors[tap])
        return F.silu(mixed), replace(self, inputs=joined)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> tuple[Tensor, DeltaState]:
        """Return the output `f32[H, n, V]` of further rows, and the state with them.

        Args:
            q: scaled queries, `f32[H, n, K]`.
            k: normalised keys, `f32[H, n, K]`.
            v: values, `f32[H, n, V]`.
            decay: logarithm of the decay at each row, `f32[H, n]`.
            beta: weight of each correction, `f32[H, n]`.
        """
        count, before = k.shape[1], self.num_rows
        keys, decay = torch.cat((self.keys, k), 1), torch.cat((self.decay, decay), 1)
        decays = add_decays(decay)
        total = decays[:, before:]
        between = total[:, :, None] - decays[:, None]
        if count > 1:
            later = torch.ones(between.shape[1:], dtype=torch.bool, device=k.device)
            between = between.masked_fill(later.triu(before + 1), -torch.inf)
        queries, factor = torch.cat((k, q), 1), between.exp().float()
        known, read = (queries @ self.state).split(count, 1)
        overlap, scores = (
            part * factor for part in (queries @ keys.transpose(1, 2)).split(count, 1)
        )
        overlap, reach = overlap * beta[..., None], total.exp().float()[..., None]
        values = beta[..., None] * (v - known * reach)
        if before:
            values = values - overlap[:, :, :before] @ self.values
        if count > 1:
            values = torch.linalg.solve_triangular(
                overlap[:, :, before:], values, upper=False, unitriangular=True
            )
        values = torch.cat((self.values, values), 1)
        longer = replace(self, keys=keys, values=values, decay=decay)
        return torch.baddbmm(read * reach, scores, values), longer


def add_decays(decay: Tensor) -> Tensor:
    """Return the sums of logarithms of decays up to each row, `f64[H, n]`.

    Only differences of them matter, so a strong decay must not hide the weak ones after it.
    """
    return decay.double().clamp(min=MIN_DECAY).cumsum(1)


class SequenceRows(NamedTuple):
    """Rows of a pass after the state of their sequence.

    Attributes:
        state: the state before them, with the rows that it keeps; None before slot 0.
        rows: their range in the pass.
        settled: slot before which no later forward starts.
        copied: slots in these rows, or at their end, before which the state is requested, in order
            and not after `settled`.
    """

    state: DeltaState | None
    rows: slice
    settled: int
    copied: Sequence[int]


class SequenceStates(NamedTuple):
    """States after the rows of a sequence.

    Attributes:
        states: those from which a forward can continue or run again, in order.
        copies: the states before the slots that were requested.
    """

    states: tuple[DeltaState, ...]
    copies: Sequence[DeltaState]


def continue_from(first: DeltaState, last: DeltaState) -> tuple[DeltaState, ...]:
    """Return the states to keep after a pass; one that fails runs again from its first row."""
    return (last,) if last.start <= first.end else (first, last)


def settled_start(state: DeltaState, count: int, settled: int) -> int:
    """Return the slot to which a state advances, given `count` further rows: its own if few."""
    if state.num_rows + count <= KEPT_ROWS:
        return state.start
    return max(state.start, min(settled, state.end + count))
