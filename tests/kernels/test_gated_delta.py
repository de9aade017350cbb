"""The gated delta rule equals its definition, alone and together, in any split of its rows."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from delta_layers import ROWS, Layer, by_definition, random_layer, run_layer, split_heads
from outpace.kernels.gated_delta import DELTA_LOOPS, DeltaState, find_delta_loop, has_delta_loop
from outpace.kernels.loader import has_isa

needs_loop = pytest.mark.skipif(
    find_delta_loop() is None,
    reason="no compiled loop: install gcc (apt-get install gcc), and reinstall outpace",
)
SMALL = random_layer(2, 4, 16, 48)
LAYERS = {
    "small": SMALL,
    "one head": random_layer(1, 1, 32, 16, 2),
    "strong": random_layer(2, 2, 16, 32, strength=40.0),
    "many taps": random_layer(1, 3, 16, 16, 8),
    "published": random_layer(2, 4, 128, 128),
    "wide": random_layer(2, 2, 256, 32),
}
PARTS = "state", "inputs", "keys", "values", "decay"


def blank(layer: Layer) -> DeltaState:
    return DeltaState.blank(layer.shape, torch.zeros(layer.taps - 1, layer.mixed.shape[1]))


def extend(layer: Layer, state: DeltaState, part: slice) -> tuple[Tensor, DeltaState]:
    """Run some of the rows in PyTorch."""
    convolved, state = state.convolve(layer.mixed[part], layer.weight)
    heads = (rows.transpose(0, 1) for rows in split_heads(layer, convolved))
    out, state = state.extend(*heads, layer.decay[part].T, layer.beta[part].T)
    return out.transpose(0, 1), state


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20)), max_size=12),
    st.sampled_from([0.01, 1.0, 30.0]),
)
def test_any_order_of_steps_gives_the_rule(
    steps: list[tuple[int, int, int]], strength: float
) -> None:
    layer = random_layer(1, 3, 6, 5, strength=strength)
    output, states = by_definition(layer)
    inputs = F.pad(layer.mixed, (0, 0, layer.taps - 1, 0))
    state = blank(layer)
    for count, dropped, added in steps:
        begin, end = state.end, min(state.end + count, ROWS)
        if begin == end:
            break
        found, state = extend(layer, state, slice(begin, end))
        torch.testing.assert_close(found.double(), output[begin:end], atol=1e-4, rtol=1e-4)
        state = state.rewind(max(state.end - dropped, state.start))
        state = state.advance(min(state.start + added, state.end))
        torch.testing.assert_close(state.state.double(), states[state.start], atol=1e-4, rtol=1e-4)
        assert torch.equal(state.inputs, inputs[state.start : state.end + layer.taps - 1])


def test_a_complete_decay_forgets() -> None:
    layer = SMALL._replace(decay=SMALL.decay.clone())
    layer.decay[7] = -1e30
    found, _ = extend(layer, blank(layer), slice(0, 12))
    _, before = blank(layer).convolve(layer.mixed[:7], layer.weight)
    first = DeltaState.blank(layer.shape, before.inputs[-3:])
    later, _ = extend(layer, first, slice(7, 12))
    torch.testing.assert_close(found[7:], later)


def is_same(state: DeltaState, other: DeltaState) -> bool:
    """Return whether two states have the same bits."""
    each = ((getattr(state, name), getattr(other, name)) for name in PARTS)
    return state.start == other.start and all(torch.equal(a, b) for a, b in each)


@needs_loop
@pytest.mark.parametrize("name", LAYERS)
def test_a_text_has_the_output_of_the_rule(name: str) -> None:
    layer = LAYERS[name]
    wanted, states = by_definition(layer)
    (whole,), (after,) = run_layer(layer, [(None, 0, ROWS)], settled=ROWS - 1)
    found = after.states[-1]
    assert (found.start, found.num_rows) == (ROWS - 1, 1)
    torch.testing.assert_close(whole.double(), wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found.state.double(), states[found.start], atol=2e-5, rtol=2e-5)
    state = None
    for slot in range(ROWS):
        (out,), (after,) = run_layer(layer, [(state, slot, slot + 1)], settled=slot)
        state = after.states[-1]
        assert torch.equal(out[0], whole[slot]), slot
        assert state.num_rows <= 8


def walk(steps: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the range of each forward, and the slot up to which its text is committed.

    A step has the rows of a forward, how many of them are rejected, and how many rows before them
    may still be dropped by a later one.
    """
    found, begin = [], 0
    for count, rejected, open_rows in steps:
        end = min(begin + count, ROWS)
        if begin == end:
            break
        found.append((begin, end, max(begin - open_rows, 0)))
        begin = max(end - rejected, begin)
    return found


STEPS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=12
)


@needs_loop
@given(st.lists(STEPS, min_size=1, max_size=4))
def test_sequences_together_have_the_bits_of_each_alone(
    texts: list[list[tuple[int, int, int]]],
) -> None:
    (whole,), _ = run_layer(SMALL, [(None, 0, ROWS)])
    plans = [walk(steps) for steps in texts]
    states: list[DeltaState | None] = [None] * len(plans)
    for number in range(max(map(len, plans))):
        now = [at for at, plan in enumerate(plans) if number < len(plan)]
        given_rows, settled = [], min(plans[at][number][2] for at in now)
        for at in now:
            begin, end, _ = plans[at][number]
            state = states[at]
            given_rows.append((None if state is None else state.rewind(begin), begin, end))
        found, after = run_layer(SMALL, given_rows, settled)
        for at, out, each, part in zip(now, found, after, given_rows, strict=True):
            _, begin, end = part
            assert torch.equal(out, whole[begin:end])
            (alone,), (own,) = run_layer(SMALL, [part], settled)
            assert torch.equal(alone, out)
            assert all(map(is_same, own.states, each.states))
            states[at] = each.states[-1]


@needs_loop
@pytest.mark.parametrize("name", LAYERS)
def test_every_loop_and_number_of_threads_gives_the_same_bits(name: str) -> None:
    layer, given_threads = LAYERS[name], torch.get_num_threads()
    found = []
    try:
        for loop, threads in [(loop, n) for loop in DELTA_LOOPS if has_isa(loop) for n in (1, 3)]:
            torch.set_num_threads(threads)
            first, (prefill,) = run_layer(layer, [(None, 0, 50)], 44, [32], loop)
            begin = prefill.states[-1].rewind(49)
            second, (after,) = run_layer(layer, [(begin, 49, ROWS)], 49, [], loop)
            parts = [*prefill.copies, *prefill.states, *after.states]
            found.append((first + second, parts))
    finally:
        torch.set_num_threads(given_threads)
    for outputs, parts in found[1:]:
        assert all(map(torch.equal, outputs, found[0][0]))
        assert all(map(is_same, parts, found[0][1]))


@needs_loop
@pytest.mark.parametrize("slots", [[16, 48], [17], [2], [20], [21, 60]])
def test_copies_continue_as_the_text_itself(slots: list[int]) -> None:
    (whole,), _ = run_layer(SMALL, [(None, 0, ROWS)])
    first = 16 if slots[0] >= 20 else 0
    state = None if not first else run_layer(SMALL, [(None, 0, first)])[1][0].states[-1]
    _, (after,) = run_layer(SMALL, [(state, first, ROWS)], slots[-1], slots)
    assert [copy.start for copy in after.copies] == slots
    for copy in after.copies:
        tensors = [getattr(copy, name) for name in PARTS]
        assert copy.num_rows == 0
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in tensors)
        if copy.start < ROWS:
            (out,), _ = run_layer(SMALL, [(copy, copy.start, ROWS)])
            assert torch.equal(out, whole[copy.start :])


@needs_loop
def test_states_of_earlier_passes_do_not_change() -> None:
    _, (before,) = run_layer(SMALL, [(None, 0, 20)], 15)
    state = before.states[-1]
    parts = {name: getattr(state, name).clone() for name in PARTS}
    found = [run_layer(SMALL, [(state, 20, 40)], 38)[0][0] for _ in range(2)]
    assert torch.equal(*found)
    assert all(torch.equal(part, getattr(state, name)) for name, part in parts.items())


@needs_loop
def test_rows_that_are_not_finite_stay_in_their_sequence() -> None:
    (whole,), _ = run_layer(SMALL, [(None, 0, ROWS)])
    for value in (torch.nan, torch.inf, 1e30):
        mixed = SMALL.mixed.clone()
        mixed[20] = value
        (out, other), _ = run_layer(SMALL._replace(mixed=mixed), [(None, 0, 40), (None, 0, 20)])
        assert torch.equal(out[:20], whole[:20]) and torch.equal(other, whole[:20])
        assert not bool(out[20].isfinite().all()) or value == 1e30
    for strong in (-1e30, -torch.inf):
        decay = SMALL.decay.clone()
        decay[7] = strong
        layer = SMALL._replace(decay=decay)
        _, (after,) = run_layer(layer, [(None, 0, 7)])
        (state,) = after.states
        empty = (part[:, :0] for part in (state.keys, state.values, state.decay))
        forgotten = DeltaState(7, blank(layer).state, state.inputs[-3:], *empty)
        (out, fresh), _ = run_layer(layer, [(state, 7, 20), (forgotten, 7, 20)])
        assert torch.equal(out, fresh) and bool(out.isfinite().all())


@needs_loop
def test_layers_without_a_loop_are_recognised() -> None:
    assert has_delta_loop((4, 128, 128), 4, torch.float32)
    for shape, taps, dtype in [
        ((4, 24, 32), 4, torch.float32),
        ((4, 32, 24), 4, torch.float32),
        ((4, 272, 32), 4, torch.float32),
        ((4, 32, 32), 9, torch.float32),
        ((4, 32, 32), 1, torch.float32),
        ((4, 32, 32), 4, torch.bfloat16),
    ]:
        assert not has_delta_loop(shape, taps, dtype)
    with pytest.raises(ValueError, match="mixed"):
        run_layer(SMALL._replace(mixed=SMALL.mixed.bfloat16()), [(None, 0, 5)])
