"""Gated delta layers in their recurrent form by a compiled CPU loop (gated_delta.c), in float32.

One call runs the rows of all sequences. The result of a row is bit-identical whatever else a call
contains, and however the rows of its sequence are split into calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, c_int, c_long, c_void_p
from functools import cache

import torch
from torch import Tensor

from outpace.kernels.gated_delta import (
    DeltaState,
    SequenceRows,
    SequenceStates,
    continue_from,
    settled_start,
)
from outpace.kernels.loader import Isa, has_isa, load_library, thread_count
from outpace.kernels.tiles import describe_tensor

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
    """Memory for what a sequence has after a pass, and the arguments that point to it.

    Attributes:
        arguments: those of the loop.
        marked: the states to write, by slot.
        next: the state that a later forward continues from.
    """

    def __init__(self, state: DeltaState, given: SequenceRows, mixed: Tensor) -> None:
        """Plan rows after `state`, with the inputs `mixed` of all rows of the pass."""
        self.first, self.given, self.mixed = state, given, mixed[given.rows]
        rows, kept = len(self.mixed), state.num_rows
        (heads, key, value), size = state.state.shape, mixed.shape[1]
        begin = settled_start(state, rows, given.settled)
        slots = sorted({begin, *given.copied} - {state.start})
        self.marked = {slot: torch.empty(heads, key, value) for slot in slots}
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
        self.arguments = SequenceArguments(
            *(state.state.data_ptr(), state.inputs.data_ptr(), state.keys.data_ptr()),
            *(state.values.data_ptr(), state.decay.data_ptr(), kept, state.decay.stride(0)),
            *(given.rows.start, rows, (MarkedState * len(marks))(*marks), len(marks)),
            *(begin - state.start, self.next.inputs.data_ptr(), self.next.keys.data_ptr()),
            *(self.next.values.data_ptr(), self.next.decay.data_ptr()),
        )

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
    """Return the instruction set of the fastest loop of this machine, if there is one."""
    return next(filter(has_isa, DELTA_LOOPS), None)


def has_delta_loop(shape: tuple[int, int, int], taps: int, dtype: torch.dtype) -> bool:
    """Return whether the loop can run a layer on a CPU.

    Args:
        shape: shape of its state, `(H, K, V)`.
        taps: rows that its convolution sees.
        dtype: dtype of its rows.
    """
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

    Raises:
        ValueError: the rows are not float32 on a CPU.
    """
    isa, loaded = loop or find_delta_loop(), load_library()
    assert loaded is not None and isa is not None
    (rows, size), (heads, key, value), taps = mixed.shape, shape, weight.shape[-1]
    if mixed.dtype is not torch.float32 or not mixed.is_cpu:
        raise ValueError(f"mixed must be float32 on a CPU, got {describe_tensor(mixed)}")
    mixed = mixed if mixed.stride(-1) == 1 else mixed.contiguous()
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
    """Plan the rows of each sequence; arguments are those of `run_recurrent`."""
    blank = None
    if any(each.state is None for each in sequences):
        blank = DeltaState.blank(shape, mixed.new_zeros(taps - 1, mixed.shape[1]))
    plans = []
    for each in sequences:
        state = each.state if blank is None or each.state is not None else blank
        assert state is not None
        plans.append(SequencePlan(state, each, mixed))
    return plans
