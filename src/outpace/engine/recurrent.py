"""Recurrent states of sequences, for models with gated delta layers.

A layer keeps the state before some slot and the rows from there on, so the next forward may start
at any of them: nothing is rolled back. Rows are added to the state once the text up to them is
committed, since no later forward of a method starts before its last token.

The prefix cache also needs the state at the end of a page. It is copied at the last page end of a
prompt, and where the cached pages with its text end. The next prompt with that text continues
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outpace.attention.batch import RowSpan
from outpace.decoding import CAUSAL, Forward
from outpace.engine.cache import PAGE_SIZE, PageStates, PageTable, cache_slots
from outpace.errors import OptionError
from outpace.kernels.gated_delta import KEPT_ROWS, DeltaState, SequenceRows
from outpace.models.attention import Attend
from outpace.models.config import ModelConfig
from outpace.models.gated_delta import RunRows


class RecurrentPass:
    """Attention and recurrent states of a pass over a model with gated delta layers."""

    def __init__(self, attend: Attend, spans: Sequence[RowSpan], *, copies: bool = False) -> None:
        """Prepare a pass; `copies` keeps states at page ends for the prefix cache."""
        self.attend, self.spans, self.copies = attend, spans, copies
        for span in spans:
            page_table(span).page_states.clear()

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        return self.attend(layer, q, k, v, sinks)

    def recur(self, layer: int, run: RunRows) -> Tensor:
        """Run the rows of each sequence in a recurrent layer, and keep its states."""
        tables, given = [page_table(span) for span in self.spans], []
        for span, table in zip(self.spans, tables, strict=True):
            state = find_state(table.states.get(layer, ()), span.start)
            copied = copied_slots(span, table) if self.copies else ()
            given.append(SequenceRows(state, span.rows, span.settled, copied))
        out, found = run(given)
        for table, (states, copies) in zip(tables, found, strict=True):
            table.states[layer] = states
            for copy in copies:
                table.page_states.setdefault(copy.start, {})[layer] = copy
        return out


def page_table(span: RowSpan) -> PageTable:
    assert isinstance(span.pages, PageTable)
    return span.pages


def copied_slots(span: RowSpan, table: PageTable) -> list[int]:
    """Return the page ends of a span whose states the prefix cache keeps."""
    last = min(span.settled, span.start + len(span)) // PAGE_SIZE * PAGE_SIZE
    return sorted({slot for slot in (table.known_end, last) if span.start < slot <= last})


def find_state(states: Sequence[DeltaState], start: int) -> DeltaState | None:
    """Return the state before slot `start`, without the rows from there on; None for slot 0."""
    if not start:
        return None
    return next(state for state in reversed(states) if has_slot(state, start)).rewind(start)


def has_slot(state: DeltaState, start: int) -> bool:
    """Return whether a forward can start at a slot from this state."""
    return state.start <= start <= state.end


def check_recurrent(forward: Forward, table: PageTable) -> None:
    """Check that a model with gated delta layers can run a forward.

    Raises:
        ValueError: the rows are not the text in order, or the state before them is not there.
    """
    if forward.pattern != CAUSAL or forward.positions is not None:
        what = "positions" if forward.pattern == CAUSAL else f"the pattern {forward.pattern!r}"
        raise ValueError(
            f"this model has gated delta layers, which run causal rows at their own positions, "
            f"not {what}"
        )
    if not table.states or not (start := forward.start):
        return
    states = next(iter(table.states.values()))
    if not any(has_slot(state, start) for state in states):
        raise ValueError(
            f"rows start at slot {start}, but the gated delta layers of this model have no state "
            f"before it: start at slot 0, or at one of {states[-1].start} to {states[-1].end}"
        )


def blank_states(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, slot: int
) -> PageStates:
    """Return states before a slot, to be filled, by layer."""
    delta = config.delta
    assert delta is not None
    inputs = torch.zeros(len(delta.layers), delta.taps - 1, delta.mixed_size, dtype=dtype)
    return {
        layer: replace(DeltaState.blank(delta.state_shape, part), start=slot)
        for layer, part in zip(delta.layers, inputs.to(device), strict=True)
    }


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the memory of the states of a sequence, with the rows that are kept."""
    if config.delta is None:
        return 0
    heads, key, value = config.delta.state_shape
    numbers = heads * (key * value + KEPT_ROWS * (key + value + 1))
    inputs = (KEPT_ROWS + config.delta.taps - 1) * config.delta.mixed_size
    return len(config.delta.layers) * (4 * numbers + inputs * dtype.itemsize)


def share_budget(
    config: ModelConfig,
    dtype: torch.dtype,
    budget: int,
    requests: int,
    *,
    cache_dtype: torch.dtype | None = None,
) -> dict[str, int | None]:
    """Return the `slots` and `sequences` for which a cache of `budget` bytes has room.

    The model computes in `dtype`; keys and values are of `cache_dtype`, by default the same.

    At most half of it is for recurrent states, the rest for keys and values. A request has two
    sequences of a model that is its target and its draft. States that no sequence needs are those
    of the prefix cache.

    Raises:
        ValueError: the states of a single request do not fit, or no slot.
    """
    cache_dtype = cache_dtype or dtype
    if not (size := state_bytes(config, dtype)):
        return {"slots": cache_slots(config, cache_dtype, budget), "sequences": None}
    if budget < 4 * size:
        raise OptionError(
            "cache_gib",
            budget / 2**30,
            f"{budget} bytes hold less than two recurrent states, {4 * size}: enlarge it",
        )
    sequences = min(2 * requests, budget // 2 // size)
    slots = cache_slots(config, cache_dtype, budget - sequences * size)
    return {"slots": slots, "sequences": sequences}
