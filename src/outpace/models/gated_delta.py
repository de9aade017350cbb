"""Gated delta layers, a mixer with a recurrent state in place of attention (Yang et al., 2025).

Shapes: T rows, H value heads and G key heads of K and V columns; a key head serves H / G value
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.kernels.gated_delta import (
    CHUNK_ROWS,
    DeltaState,
    SequenceRows,
    SequenceStates,
    continue_from,
    settled_start,
)
from outpace.models.config import ModelConfig
from outpace.models.experts import PreciseLinear

RunRows = Callable[[Sequence[SequenceRows]], tuple[Tensor, list[SequenceStates]]]
"""Runs the rows of all sequences of a pass; returns their output `f32[T, H, V]`, and states."""

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys, in the authors' code."""


class Recur(Protocol):
    """Recurrent states managed by the caller."""

    def recur(self, layer: int, run: RunRows) -> Tensor:
        """Run the rows of each sequence of a pass after its state, and return their output."""
        ...


class GatedDelta(nn.Module):
    """Projections of one layer, its convolution and its output gate."""

    # It is used as `Attention` is; rotary tables and context rows have no meaning for it.

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.delta is not None
        self.layer, self.sizes = layer, config.delta
        sizes = self.sizes
        self.qkvz = nn.Linear(config.dim, sizes.mixed_size + sizes.value_size, bias=False)
        self.gates = PreciseLinear(config.dim, 2 * sizes.value_heads, bias=False)
        self.convolution = nn.Parameter(torch.zeros(sizes.mixed_size, 1, sizes.taps))
        self.log_decay = nn.Parameter(torch.zeros(sizes.value_heads))
        self.step_bias = nn.Parameter(torch.ones(sizes.value_heads))
        self.norm = nn.RMSNorm(sizes.value_dim, config.norm_eps)
        self.merge = nn.Linear(sizes.value_size, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        memory: Recur,
        wanted: Tensor | None = None,
        context_rows: int = 0,
    ) -> Tensor:
        """Mix rows `x [T, dim]` with those before them and return the `wanted` ones."""
        mixed, z, beta, decay = self.project_rows(x)
        run = partial(self.run_sequences, mixed, decay, beta)
        out = memory.recur(self.layer, run).to(x.dtype)
        if wanted is not None:
            out, z = out[wanted], z[wanted]
        gated = self.norm(out) * F.silu(z.float())
        merged: Tensor = self.merge(gated.to(x.dtype).flatten(1))
        return merged

    def project_rows(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the recurrence for rows `x [T, dim]`.

        Returns:
            Inputs of the convolution `[T, size]`, output gates `[T, H, V]`, weights of corrections
            `f32[T, H]`, and logarithms of decays `f32[T, H]`.
        """
        sizes, count = self.sizes, len(x)
        if sizes.grouped:
            each = sizes.value_heads // sizes.key_heads
            widths = [sizes.key_dim] * 2 + [each * sizes.value_dim] * 2
            q, k, v, z = self.qkvz(x).view(count, sizes.key_heads, -1).split(widths, -1)
            mixed = torch.cat([part.flatten(1) for part in (q, k, v)], -1)
            b, a = self.gates(x).view(count, sizes.key_heads, -1).chunk(2, -1)
            b, a = b.flatten(1), a.flatten(1)
        else:
            mixed, z = self.qkvz(x).split((sizes.mixed_size, sizes.value_size), -1)
            b, a = self.gates(x).chunk(2, -1)
        step = F.softplus(a + self.step_bias.float())
        z = z.reshape(count, sizes.value_heads, sizes.value_dim)
        return mixed, z, b.sigmoid(), -self.log_decay.float().exp() * step

    def run_sequences(
        self, mixed: Tensor, decay: Tensor, beta: Tensor, sequences: Sequence[SequenceRows]
    ) -> tuple[Tensor, list[SequenceStates]]:
        """Run the rows of all sequences, one after another; does what a `RunRows` does."""
        outputs, found = [], []
        for rows in sequences:
            state = rows.state
            if state is None:
                inputs = mixed.new_zeros(self.sizes.taps - 1, self.sizes.mixed_size)
                state = DeltaState.blank(self.sizes.state_shape, inputs)
            parts = mixed[rows.rows], decay[rows.rows], beta[rows.rows]
            out, states = self.run_sequence(state, parts, rows.settled, rows.copied)
            outputs.append(out)
            found.append(states)
        return torch.cat(outputs), found

    def run_sequence(
        self, state: DeltaState, parts: Sequence[Tensor], settled: int, copied: Sequence[int]
    ) -> tuple[Tensor, SequenceStates]:
        """Return the output `f32[n, H, V]` of the rows of one sequence, and its states."""
        first, outputs, copies = state, [], []
        for rows in zip(*(part.split(CHUNK_ROWS) for part in parts), strict=True):
            begin, state = state.end, settle_rows(state, len(rows[0]), settled)
            out, state = self.run_chunk(state, *rows)
            outputs.append(out)
            copies += [state.copy_before(slot) for slot in copied if begin < slot <= state.end]
        last = settle_rows(state, 0, settled)
        return torch.cat(outputs), SequenceStates(continue_from(first, last), copies)

    def run_chunk(
        self, state: DeltaState, mixed: Tensor, decay: Tensor, beta: Tensor
    ) -> tuple[Tensor, DeltaState]:
        """Return the output `f32[n, H, V]` of a few rows after `state`, and the state with them."""
        sizes = self.sizes
        mixed, state = state.convolve(mixed, self.convolution)
        qk, v = mixed.split((2 * sizes.key_size, sizes.value_size), -1)
        heads = qk.unflatten(-1, (2, sizes.key_heads, -1))
        heads = heads * (heads.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
        q, k = heads.repeat_interleave(sizes.value_heads // sizes.key_heads, 2).permute(1, 2, 0, 3)
        v = v.unflatten(-1, (sizes.value_heads, -1)).transpose(0, 1)
        out, state = state.extend(q * sizes.key_dim**-0.5, k, v, decay.T, beta.T)
        return out.transpose(0, 1), state


def whole_sequences(ranges: Sequence[tuple[int, int]]) -> list[SequenceRows]:
    """Return sequences with these ranges of rows, which are complete: nothing continues them."""
    return [SequenceRows(None, slice(first, end), end - first, ()) for first, end in ranges]


def settle_rows(state: DeltaState, count: int, settled: int) -> DeltaState:
    return state.advance(min(settled_start(state, count, settled), state.end))
