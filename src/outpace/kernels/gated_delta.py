"""The gated delta rule (Yang et al., 2025): in PyTorch, in float32, and compiled.

A layer has H heads, each with a state `S [K, V]`. Row i decays it, and replaces the value under its
key: `S = exp(g) S; u = beta (v - k S); S = S + k u`. It returns `q S`. The corrected values `u` of
n rows follow from the state before them by one triangular solve, so neither the state after each
row nor that after the last one is needed. It is advanced by any number of rows later, in one
product.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_int, c_long, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.loader import Isa, has_isa, load_library, thread_count
from outpace.kernels.tiles import describe_tensor

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
    """State of one layer of one sequence, and the rows after it."""

    start: int
    """Slot of the first row after the state."""
    state: Tensor
    """`f32[H, K, V]`."""
    inputs: Tensor
    """Inputs of the convolution, `[c, size]`: those of the slots before `start`, then those of the
    rows."""
    keys: Tensor
    """Keys of the n rows, `f32[H, n, K]`."""
    values: Tensor
    """Their corrected values, `f32[H, n, V]`."""
    decay: Tensor
    """Logarithm of the decay at each row, `f32[H, n]`."""

    @classmethod
    def blank(cls, shape: tuple[int, int, int], inputs: Tensor) -> DeltaState:
        """Return the state before slot 0, for a state's shape `(H, K, V)` and blank inputs."""
        heads, key, value = shape
        state = torch.zeros(shape, device=inputs.device)
        keys, values = state.new_empty(heads, 0, key), state.new_empty(heads, 0, value)
        return cls(0, state, inputs, keys, values, keys.new_empty(heads, 0))

    @property
    def num_rows(self) -> int:
        return self.decay.shape[1]

    @property
    def end(self) -> int:
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
        # Rows since the state are run with those before them, whose corrections exist already.
        keys, decay = torch.cat((self.keys, k), 1), torch.cat((self.decay, decay), 1)
        decays = add_decays(decay)
        total = decays[:, before:]
        between = total[:, :, None] - decays[:, None]
        if count > 1:
            later = torch.ones(between.shape[1:], dtype=torch.bool, device=k.device)
            between = between.masked_fill(later.triu(before + 1), -torch.inf)
        # Keys are read like queries: a correction needs what is stored under its key.
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
            # The correction of a row changes what all later rows find: a triangular system, which
            # is solved for all rows at once.
            values = torch.linalg.solve_triangular(
                overlap[:, :, before:], values, upper=False, unitriangular=True
            )
        values = torch.cat((self.values, values), 1)
        longer = replace(self, keys=keys, values=values, decay=decay)
        return torch.baddbmm(read * reach, scores, values), longer


def add_decays(decay: Tensor) -> Tensor:
    """Return the sums of logarithms of decays up to each row, `f64[H, n]`."""
    # Only differences of them matter, so a strong decay must not hide the weak ones after it.
    return decay.double().clamp(min=MIN_DECAY).cumsum(1)


class SequenceRows(NamedTuple):
    """Rows of a pass after the state of their sequence."""

    state: DeltaState | None
    """The state before them, with the rows that it keeps; None before slot 0."""
    rows: slice
    """Their range in the pass."""
    settled: int
    """Slot before which no later forward starts."""
    copied: Sequence[int]
    """Slots in these rows, or at their end, before which the state is requested, in order and not
    after `settled`."""


class SequenceStates(NamedTuple):
    """States after the rows of a sequence."""

    states: tuple[DeltaState, ...]
    """Those from which a forward can continue or run again, in order."""
    copies: Sequence[DeltaState]
    """The states before the slots that were requested."""


def continue_from(first: DeltaState, last: DeltaState) -> tuple[DeltaState, ...]:
    """Return the states to keep after a pass; one that fails runs again from its first row."""
    return (last,) if last.start <= first.end else (first, last)


def settled_start(state: DeltaState, count: int, settled: int) -> int:
    """Return the slot to which a state advances, given `count` further rows: its own if few."""
    if state.num_rows + count <= KEPT_ROWS:
        return state.start
    return max(state.start, min(settled, state.end + count))


DELTA_LOOPS = Isa.AVX512, Isa.AVX2, Isa.NEON
"""Instruction sets with loops, fastest first."""

HEAD_MULTIPLE, MAX_KEY_SIZE, MAX_TAPS = 16, 256, 8
"""Required divisor of the sizes of heads, and the maxima of keys and of the convolution's rows."""


class MarkedState(Structure):
    """A state to write: the struct `mark` of gated_delta.c."""

    _fields_ = (("row", c_long), ("state", c_void_p))


class SequenceArguments(Structure):
    """Arguments for one sequence: the struct `sequence` of gated_delta.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("state", "inputs", "keys", "values", "decays")),
        *((name, c_long) for name in ("kept", "room", "first", "rows")),
        ("marks", POINTER(MarkedState)),
        *((name, c_long) for name in ("num_marks", "begin")),
        *((name, c_void_p) for name in ("next_inputs", "next_keys", "next_values", "next_decays")),
    )


class RecurArguments(Structure):
    """Arguments of the loop: the struct `pass` of gated_delta.c."""

    _fields_ = (
        *((name, c_int) for name in ("isa", "threads")),
        *((name, c_long) for name in ("key_heads", "value_heads", "key_size", "value_size")),
        ("taps", c_long),
        *((name, c_void_p) for name in ("inputs", "weight")),
        ("stride", c_long),
        *((name, c_void_p) for name in ("decays", "weights", "mixed", "out")),
        ("sequences", POINTER(SequenceArguments)),
        ("num_sequences", c_long),
    )


class SequencePlan:
    """Memory for what a sequence has after a pass, and the arguments that point to it."""

    def __init__(self, state: DeltaState, given: SequenceRows, mixed: Tensor) -> None:
        """Plan rows after `state`, with the inputs `mixed` of all rows of the pass."""
        self.first, self.given, self.mixed = state, given, mixed[given.rows]
        rows, kept = len(self.mixed), state.num_rows
        (heads, key, value), size = state.state.shape, mixed.shape[1]
        begin = settled_start(state, rows, given.settled)
        slots = sorted({begin, *given.copied} - {state.start})
        self.marked = {slot: torch.empty(heads, key, value) for slot in slots}
        """The states to write, by slot."""
        marks = [
            MarkedState(slot - state.start, each.data_ptr()) for slot, each in self.marked.items()
        ]
        room = state.end + rows - begin
        taps = len(state.inputs) - kept
        self.next = DeltaState(
            begin,
            self.marked.get(begin, state.state),
            torch.empty(taps + room, size),
            torch.empty(heads, room, key),
            torch.empty(heads, room, value),
            torch.empty(heads, room),
        )
        """The state that a later forward continues from."""
        self.arguments = SequenceArguments(
            *(state.state.data_ptr(), state.inputs.data_ptr(), state.keys.data_ptr()),
            *(state.values.data_ptr(), state.decay.data_ptr(), kept, state.decay.stride(0)),
            *(given.rows.start, rows, (MarkedState * len(marks))(*marks), len(marks)),
            *(begin - state.start, self.next.inputs.data_ptr(), self.next.keys.data_ptr()),
            *(self.next.values.data_ptr(), self.next.decay.data_ptr()),
        )
        """Those of the loop."""

    def collect(self) -> SequenceStates:
        """Return the states that the loop has written."""
        copies = [self.copy_before(slot) for slot in self.given.copied]
        return SequenceStates(continue_from(self.first, self.next), copies)

    def copy_before(self, slot: int) -> DeltaState:
        """Return a copy of the state before a slot of these rows, or at their end."""
        taps = len(self.first.inputs) - self.first.num_rows
        joined = torch.cat((self.first.inputs, self.mixed[: slot - self.first.end][-taps:]))
        none = (part[:, :0].clone() for part in (self.next.keys, self.next.values, self.next.decay))
        return DeltaState(slot, self.marked[slot], joined[-taps:].clone(), *none)


@cache
def find_delta_loop() -> Isa | None:
    return next(filter(has_isa, DELTA_LOOPS), None)


def has_delta_loop(shape: tuple[int, int, int], taps: int, dtype: torch.dtype) -> bool:
    """Return whether the loop can run a layer on a CPU."""
    _, key, value = shape
    fits = key % HEAD_MULTIPLE == value % HEAD_MULTIPLE == 0 and key <= MAX_KEY_SIZE
    fits = fits and 1 < taps <= MAX_TAPS and dtype is torch.float32
    return fits and find_delta_loop() is not None


def run_recurrent(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    weight: Tensor,
    sequences: Sequence[SequenceRows],
    shape: tuple[int, int, int],
    loop: Isa | None = None,
) -> tuple[Tensor, list[SequenceStates]]:
    """Run the rows of all sequences, and return their output `f32[T, H, V]` and states.

    Args:
        mixed: inputs of the convolution, `f32[T, size]`.
        decay: logarithms of decays, `f32[T, H]`.
        beta: weights of corrections, `f32[T, H]`.
        weight: weight of the convolution, `f32[size, 1, taps]`.
        sequences: rows of each sequence, in order.
        shape: shape of a state, `(H, K, V)`.
        loop: instruction set of the loop to use; the fastest by default.
    """
    isa, loaded = loop or find_delta_loop(), load_library()
    assert loaded is not None and isa is not None
    (rows, size), (heads, key, value), taps = mixed.shape, shape, weight.shape[-1]
    if mixed.dtype is not torch.float32 or not mixed.is_cpu:
        raise ValueError(f"mixed must be float32 on a CPU, got {describe_tensor(mixed)}")
    mixed = mixed if mixed.stride(-1) == 1 else mixed.contiguous()
    # The loop sees addresses only, and takes these arrays for contiguous ones.
    decay, beta, weight = decay.contiguous(), beta.contiguous(), weight.contiguous()
    key_heads = (size - heads * value) // (2 * key)
    plans = plan_sequences(mixed, sequences, shape, taps)
    table = (SequenceArguments * len(plans))(*(plan.arguments for plan in plans))
    scratch, out = torch.empty(rows, size + key_heads), torch.empty(rows, heads, value)
    total = rows + sum(plan.first.num_rows for plan in plans)
    given = RecurArguments(
        *(isa, thread_count(4 * total * heads * key * value), key_heads, heads, key, value, taps),
        *(mixed.data_ptr(), weight.data_ptr(), mixed.stride(0), decay.data_ptr(), beta.data_ptr()),
        *(scratch.data_ptr(), out.data_ptr(), table, len(plans)),
    )
    loaded.outpace_recur(addressof(given))
    return out, [plan.collect() for plan in plans]


def plan_sequences(
    mixed: Tensor, sequences: Sequence[SequenceRows], shape: tuple[int, int, int], taps: int
) -> list[SequencePlan]:
    blank = None
    if any(each.state is None for each in sequences):
        blank = DeltaState.blank(shape, mixed.new_zeros(taps - 1, mixed.shape[1]))
    plans = []
    for each in sequences:
        state = each.state if blank is None or each.state is not None else blank
        assert state is not None
        plans.append(SequencePlan(state, each, mixed))
    return plans
