"""Recurrent states of sequences, for models with gated delta layers.

A layer keeps the state before some slot and the rows from there on, so the next forward may start
at any of them: nothing is rolled back. Rows are added to the state once the text up to them is
committed, since no later forward of a method starts before its last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.attention.batch import RowSpan
from outpace.decoding import CAUSAL, Forward
from outpace.engine.cache import PageTable, cache_slots
from outpace.errors import OptionError
from outpace.kernels.gated_delta import KEPT_ROWS, DeltaState
from outpace.models.config import ModelConfig
from outpace.models.gated_delta import RunRows
from outpace.models.transformer import Attend


class RecurrentPass:
    """Attention and recurrent states of a pass over a model with gated delta layers."""

    def __init__(self, attend: Attend, spans: Sequence[RowSpan]) -> None:
        self.attend, self.spans = attend, spans

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend in a layer with attention."""
        return self.attend(layer, q, k, v, sinks)

    def recur(self, layer: int, run: RunRows) -> Tensor:
        """Run the rows of each sequence in a recurrent layer, and keep its states."""
        parts: list[Tensor] = []
        for span in self.spans:
            table = span.pages
            assert isinstance(table, PageTable)
            state = find_state(table.states.get(layer, ()), span.start)
            out, states = run(state, span.rows, span.settled)
            table.states[layer] = states
            parts.append(out)
        return torch.cat(parts)


def find_state(states: Sequence[DeltaState], start: int) -> DeltaState | None:
    """Return the state before slot `start`, without the rows from there on; None for slot 0."""
    if not start:
        return None
    for state in reversed(states):
        if state.start <= start <= state.end:
            return state.rewind(start)
    raise ValueError(describe_restart(states, start))


def describe_restart(states: Sequence[DeltaState], start: int) -> str:
    """Return the message for a forward that cannot start where it does."""
    last = states[-1]
    return (
        f"rows start at slot {start}, but the gated delta layers of this model have no state "
        f"before it: start at slot 0, or at one of {last.start} to {last.end}"
    )


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
    if table.states and forward.start:
        find_state(next(iter(table.states.values())), forward.start)


def state_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the memory of the states of a sequence, with the rows that are kept."""
    if config.delta is None:
        return 0
    heads, key, value = config.delta.state_shape
    numbers = heads * (key * value + KEPT_ROWS * (key + value + 2))
    inputs = (KEPT_ROWS + config.delta.taps - 1) * config.delta.mixed_size
    return len(config.delta.layers) * (4 * numbers + inputs * dtype.itemsize)


def share_budget(
    config: ModelConfig, dtype: torch.dtype, budget: int, requests: int
) -> dict[str, int | None]:
    """Return the `slots` and `sequences` for which a cache of `budget` bytes has room.

    At most half of it is for recurrent states, the rest for keys and values. A request has two
    sequences of a model that is its target and its draft.

    Raises:
        ValueError: the states of a single request do not fit, or no slot.
    """
    if not (size := state_bytes(config, dtype)):
        return {"slots": cache_slots(config, dtype, budget), "sequences": None}
    if budget < 4 * size:
        raise OptionError(
            "cache_gib",
            budget / 2**30,
            f"cache_gib: {budget} bytes are less than {4 * size}, twice the recurrent states of "
            "two sequences: give a larger cache_gib",
        )
    sequences = min(2 * requests, budget // 2 // size)
    slots = cache_slots(config, dtype, budget - sequences * size)
    return {"slots": slots, "sequences": sequences}
