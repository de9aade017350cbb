"""The reference back end against attention written out row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.attention.dense import DenseAttention, Segment, attention

HEADS, KEYS, DIM = 4, 2, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that are the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(q: Tensor, keys: Tensor, values: Tensor, seen: list[list[int]]) -> Tensor:
    """Each row and head alone, over the slots that the row sees."""
    out = torch.empty_like(q)
    for row, slots in enumerate(seen):
        for head in range(HEADS):
            k = keys[slots, head * KEYS // HEADS]
            v = values[slots, head * KEYS // HEADS]
            out[row, head] = (k @ q[row, head] / DIM**0.5).softmax(0) @ v
    return out


@given(st.integers(1, 6), st.integers(1, 12), st.booleans(), st.data())
@settings(max_examples=50)
def test_rows_see_what_their_mask_says(
    rows: int, length: int, scattered: bool, data: st.DataObject
) -> None:
    """Over contiguous slots or scattered ones."""
    q, keys, values = random(rows, HEADS, DIM), random(40, KEYS, DIM), random(40, KEYS, DIM, seed=1)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:length]
    stops = data.draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows))
    places = slots.tolist() if scattered else list(range(7, 7 + length))
    segment = Segment(
        rows=slice(0, rows),
        slots=slots if scattered else slice(7, 7 + length),
        mask=torch.arange(length) < torch.tensor(stops)[:, None],
    )
    expected = by_hand(q, keys, values, [places[:stop] for stop in stops])
    torch.testing.assert_close(attention(q, keys, values, segment), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_no_mask_is_needed_for_full_and_causal_rows(causal: bool) -> None:
    """All slots, or those up to the row's own."""
    q, keys, values = random(5, HEADS, DIM), random(9, KEYS, DIM), random(9, KEYS, DIM, seed=1)
    segment = Segment(rows=slice(0, 5), slots=slice(2, 7), causal=causal)
    seen = [list(range(2, 3 + row if causal else 7)) for row in range(5)]
    torch.testing.assert_close(attention(q, keys, values, segment), by_hand(q, keys, values, seen))


def test_rows_are_stored_before_anyone_attends() -> None:
    """Each layer has its own memory, each segment its own slots."""
    memory = torch.zeros(2, 2, 12, KEYS, DIM)
    q, k, v = random(5, HEADS, DIM), random(5, KEYS, DIM, seed=1), random(5, KEYS, DIM, seed=2)
    write = torch.tensor([3, 4, 9, 10, 11])
    segments = [
        Segment(
            rows=slice(0, 2), slots=slice(3, 5), mask=torch.tensor([[True, False], [True] * 2])
        ),
        Segment(rows=slice(2, 5), slots=slice(9, 12), causal=True),
    ]
    attend = DenseAttention(list(memory[0]), list(memory[1]), write, segments)
    out = attend(1, q, k, v)
    assert torch.equal(memory[0, 1, write], k) and torch.equal(memory[1, 1, write], v)
    assert not memory[:, 0].any() and not memory[:, 1, :3].any()
    seen = [[3], [3, 4], [9], [9, 10], [9, 10, 11]]
    torch.testing.assert_close(out, by_hand(q, memory[0, 1], memory[1, 1], seen))
