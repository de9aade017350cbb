"""The gated delta rule equals its definition, however its rows are split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from outpace.kernels.gated_delta import DeltaState

HEADS, KEY, VALUE, TAPS, SIZE, ROWS = 3, 6, 5, 4, 7, 40
SHAPE = (HEADS, KEY, VALUE)


def rows(count: int = ROWS, *, seed: int = 0, decay: float = 1.0) -> tuple[Tensor, ...]:
    """Return queries, normalised keys, values, log decays and weights of random rows."""
    torch.manual_seed(seed)
    q, k = torch.randn(HEADS, count, KEY), F.normalize(torch.randn(HEADS, count, KEY), dim=-1)
    v = torch.randn(HEADS, count, VALUE)
    return q, k, v, -decay * torch.rand(HEADS, count), torch.rand(HEADS, count)


def blank() -> DeltaState:
    """Return the state before the first row."""
    return DeltaState.blank(SHAPE, torch.zeros(TAPS - 1, SIZE))


def by_definition(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> list[Tensor]:
    """Return the outputs `[H, n, V]`, and the state after each row, in float64."""
    q, k, v, decay, beta = (part.double() for part in (q, k, v, decay, beta))
    state = torch.zeros(SHAPE, dtype=torch.float64)
    outputs, states = [], [state]
    for row in range(k.shape[1]):
        state = state * decay[:, row, None, None].exp()
        error = v[:, row] - torch.einsum("hk,hkv->hv", k[:, row], state)
        state = state + torch.einsum("hk,hv->hkv", k[:, row], beta[:, row, None] * error)
        outputs.append(torch.einsum("hk,hkv->hv", q[:, row], state))
        states.append(state)
    return [torch.stack(outputs, 1), *states]


def extend(state: DeltaState, given: tuple[Tensor, ...], part: slice) -> tuple[Tensor, DeltaState]:
    """Run some of the rows, with inputs that their slots number."""
    count = len(range(ROWS)[part])
    numbers = torch.arange(ROWS)[part, None].expand(count, SIZE).float()
    _, state = state.convolve(numbers, torch.ones(SIZE, 1, TAPS))
    return state.extend(*(each[:, part] for each in given))


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20)), max_size=12),
    st.sampled_from([0.01, 1.0, 30.0]),
)
@settings(max_examples=40)
def test_any_order_of_steps_gives_the_rule(steps: list[tuple[int, int, int]], decay: float) -> None:
    given_rows = rows(decay=decay)
    output, *states = by_definition(*given_rows)
    state = blank()
    for count, dropped, added in steps:
        begin, end = state.end, min(state.end + count, ROWS)
        if begin == end:
            break
        found, state = extend(state, given_rows, slice(begin, end))
        torch.testing.assert_close(found.double(), output[:, begin:end], atol=1e-4, rtol=1e-4)
        state = state.rewind(max(state.end - dropped, state.start))
        state = state.advance(min(state.start + added, state.end))
        torch.testing.assert_close(state.state.double(), states[state.start], atol=1e-4, rtol=1e-4)
        kept = torch.arange(state.start - TAPS + 1, state.end).clamp(min=0).float()
        assert torch.equal(state.inputs[:, 0], kept)


def test_a_row_does_not_read_later_ones() -> None:
    q, k, v, decay, beta = rows()
    v = v.clone()
    v[:, 5:] = torch.inf
    found, _ = extend(blank(), (q, k, v, decay, beta), slice(0, 5))
    assert bool(found.isfinite().all())


def test_a_complete_decay_forgets() -> None:
    q, k, v, decay, beta = rows()
    decay = decay.clone()
    decay[:, 7] = -1e30
    found, _ = extend(blank(), (q, k, v, decay, beta), slice(0, 12))
    fresh = tuple(each[:, 7:] for each in (q, k, v, decay, beta))
    later, _ = extend(blank(), fresh, slice(0, 5))
    torch.testing.assert_close(found[:, 7:], later)


@pytest.mark.parametrize("cut", [1, 2, 3, 9])
def test_the_convolution_is_causal_and_continues(cut: int) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(12, SIZE), torch.randn(SIZE, 1, TAPS)
    padded = F.pad(inputs.T, (TAPS - 1, 0))
    wanted = F.silu(F.conv1d(padded[None], weight, groups=SIZE)[0].T)
    whole, _ = blank().convolve(inputs, weight)
    torch.testing.assert_close(whole, wanted)
    first, state = blank().convolve(inputs[:cut], weight)
    _, state = state.extend(*rows(cut))
    second, _ = state.convolve(inputs[cut:], weight)
    torch.testing.assert_close(torch.cat((first, second)), whole)
