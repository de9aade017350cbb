"""Gated delta layers with random rows, and passes of the compiled loop over them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.gated_delta import DeltaState, SequenceRows, SequenceStates, run_recurrent
from outpace.kernels.loader import Isa

ROWS = 60


class Layer(NamedTuple):
    """Sizes of a layer, and rows of one text."""

    key_heads: int
    heads: int
    key: int
    value: int
    taps: int
    mixed: Tensor
    decay: Tensor
    beta: Tensor
    weight: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.key, self.value


def random_layer(
    key_heads: int, heads: int, key: int, value: int, taps: int = 4, *, strength: float = 1.0
) -> Layer:
    """Return a layer with random rows; `strength` is the largest logarithm of a decay."""
    torch.manual_seed(key_heads + value)
    size = 2 * key_heads * key + heads * value
    decay = -strength * torch.rand(ROWS, heads)
    parts = torch.randn(ROWS, size + 8)[:, :size], decay, torch.rand(ROWS, heads)
    return Layer(key_heads, heads, key, value, taps, *parts, torch.randn(size, 1, taps))


def run_layer(
    layer: Layer,
    parts: Sequence[tuple[DeltaState | None, int, int]],
    settled: int = 0,
    copied: Sequence[int] = (),
    loop: Isa | None = None,
) -> tuple[list[Tensor], list[SequenceStates]]:
    """Run slots `begin` to `end` after each state, as sequences of one pass."""
    slots = [slot for _, begin, end in parts for slot in range(begin, end)]
    sequences, first = [], 0
    for state, begin, end in parts:
        rows = slice(first, first + end - begin)
        sequences.append(SequenceRows(state, rows, settled, copied))
        first = rows.stop
    given = layer.mixed[slots], layer.decay[slots], layer.beta[slots], layer.weight
    out, states = run_recurrent(*given, sequences, layer.shape, loop)
    return [*out.split([end - begin for _, begin, end in parts])], states


def split_heads(layer: Layer, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries and normalised keys `[T, H, K]`, and values `[T, H, V]`."""
    width = layer.key_heads * layer.key
    q, k, v = convolved.split([width, width, layer.heads * layer.value], -1)
    each = layer.heads // layer.key_heads
    q, k = (
        (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(each, 1)
        for part in (part.unflatten(1, (layer.key_heads, -1)) for part in (q, k))
    )
    return q * layer.key**-0.5, k, v.unflatten(1, (layer.heads, -1))


def by_definition(layer: Layer) -> tuple[Tensor, list[Tensor]]:
    """Return the output `[T, H, V]` of a loop over the rows, and the state before each."""
    mixed, decay, beta = (part.double() for part in (layer.mixed, layer.decay, layer.beta))
    padded = F.pad(mixed.T, (layer.taps - 1, 0))
    convolved = F.conv1d(padded[None], layer.weight.double(), groups=mixed.shape[1])[0].T
    q, k, v = split_heads(layer, F.silu(convolved))
    state = torch.zeros(layer.shape, dtype=torch.float64)
    outputs, states = [], [state]
    for row in range(ROWS):
        state = state * decay[row, :, None, None].exp()
        error = v[row] - torch.einsum("hk,hkv->hv", k[row], state)
        state = state + torch.einsum("hk,hv->hkv", k[row], beta[row, :, None] * error)
        outputs.append(torch.einsum("hk,hkv->hv", q[row], state))
        states.append(state)
    return torch.stack(outputs), states
