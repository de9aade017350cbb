"""Compare the reference back end with attention computed row by row."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace.attention.batch import AttentionBatch, RowSpan
from outpace.attention.dense import DenseAttention
from outpace.decoding.tree import Tree
from outpace.models.config import AttentionWindow
from spans import random

HEADS, KEYS, DIM = 4, 2, 8


def first(pair: tuple[int, int]) -> int:
    return pair[0]


def by_hand(
    q: Tensor, keys: Tensor, values: Tensor, seen: list[list[int]], sinks: Tensor | None = None
) -> Tensor:
    """Attend with each row and head alone over the slots visible to the row."""
    out = torch.empty_like(q)
    sinks = torch.full((HEADS,), -torch.inf) if sinks is None else sinks
    for row, slots in enumerate(seen):
        for head in range(HEADS):
            k = keys[slots, head * KEYS // HEADS]
            v = values[slots, head * KEYS // HEADS]
            scores = torch.cat((k @ q[row, head] / DIM**0.5, sinks[head, None]))
            out[row, head] = scores.softmax(0)[:-1] @ v
    return out


class Memory:
    """Slots of one sequence."""

    def __init__(self, slots: list[int]) -> None:
        self.slots = np.array(slots)


def batch(spans: list[RowSpan], write: Sequence[int]) -> AttentionBatch:
    """Create a batch; attention uses only its slots, not its tokens."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return AttentionBatch(nothing, nothing, torch.tensor(write, dtype=torch.int64), None, spans)


def attend(
    memory: Tensor,
    spans: list[RowSpan],
    q: Tensor,
    window: AttentionWindow | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend in the last layer over the stored keys, without writing new ones."""
    windows = [AttentionWindow(), window] if window else []
    backend = DenseAttention(list(memory[0]), list(memory[1]), HEADS, windows)
    none = q.new_zeros(0, KEYS, DIM)
    return backend.plan_pass(batch(spans, []))(1, q, none, none, sinks)


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 3)), min_size=2, max_size=6, unique_by=first
    ),
    st.sampled_from([None, AttentionWindow(window=3), AttentionWindow(causal=True)]),
    st.sampled_from([None, torch.tensor([0.0, -3.0, 2.0, 9.0])]),
    st.data(),
)
def test_rows_see_up_to_their_visible_end(
    placed: list[tuple[int, int]],
    window: AttentionWindow | None,
    sinks: Tensor | None,
    data: st.DataObject,
) -> None:
    memory = random(2, 2, 8 * 16, KEYS, DIM)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2)).tolist()
    spans: list[RowSpan] = []
    seen: list[list[int]] = []
    for place, rows in placed:
        start = data.draw(st.integers(0, 16 - rows))
        scattered, begin = data.draw(st.booleans()), spans[-1].rows.stop if spans else 0
        end = start + rows
        slots = [place * 16 + slot for slot in (order if scattered else range(16))]
        pages = Memory(slots)
        ends = st.lists(st.integers(1, end), min_size=rows - 1, max_size=rows - 1)
        stops = data.draw(st.none() | ends.map(lambda ends, end=end: [*sorted(ends), end]))
        spans.append(RowSpan(slice(begin, begin + rows), start, end, stops, pages))
        for own, stop in zip(range(start, end), stops or range(start + 1, end + 1), strict=True):
            least = 0 if window is None or window.window is None else own - window.window + 1
            last = min(stop, own + 1) if window and window.causal else stop
            seen.append(slots[max(least, 0) : last])
    q = random(spans[-1].rows.stop, HEADS, DIM)
    expected = by_hand(q, memory[0, 1], memory[1, 1], seen, sinks)
    torch.testing.assert_close(attend(memory, spans, q, window, sinks), expected)


trees = st.lists(st.integers(-1, 5), min_size=1, max_size=6).map(
    lambda parents: [min(parent, row - 1) for row, parent in enumerate(parents)]
)


@given(
    st.lists(st.tuples(trees, st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from([None, AttentionWindow(window=3), AttentionWindow(causal=True)]),
    st.booleans(),
)
def test_tree_rows_see_prefix_and_ancestors(
    grown: list[tuple[list[int], int, int]], window: AttentionWindow | None, scattered: bool
) -> None:
    memory = random(2, 2, 8 * 16, KEYS, DIM)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    spans: list[RowSpan] = []
    seen: list[list[int]] = []
    for place, (parents, text, again) in enumerate(grown):
        slots = [place * 16 + slot for slot in (order if scattered else range(16))]
        trunk, begin = text + again, spans[-1].rows.stop if spans else 0
        tree = Tree.from_parents(trunk, parents)
        end = trunk + len(parents)
        spans.append(
            RowSpan(
                slice(begin, begin + end - text),
                text,
                end,
                tree.visible_ends(text),
                Memory(slots),
                tree,
            )
        )
        shown = [list(range(own + 1)) for own in range(text, trunk)]
        above: list[list[int]] = []
        for row, parent in enumerate(parents):
            above.append([*(above[parent] if parent >= 0 else []), trunk + row])
            shown.append([*range(trunk), *above[-1]])
        count = 16 if window is None or window.window is None else window.window
        seen += [[slots[slot] for slot in row[-count:]] for row in shown]
    q = random(spans[-1].rows.stop, HEADS, DIM)
    expected = by_hand(q, memory[0, 1], memory[1, 1], seen)
    torch.testing.assert_close(attend(memory, spans, q, window), expected)


@pytest.mark.parametrize("window", [2, 3, 12])
@pytest.mark.parametrize(
    ("tree", "text", "seen"),
    [
        # Three rows see each other.
        (
            Tree(4, (0, 0b111, 0b111, 0b1)),
            3,
            [[0, 1, 2, 3], [0, 1, 2, 3, 4], *[[0, 1, 2, 3, 4, 5, 6]] * 2, [0, 1, 2, 3, 4, 7]],
        ),
        # Masks include rows of earlier forwards.
        (Tree(4, (0b01, 0b10)), 6, [[0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 5, 7]]),
    ],
)
def test_tree_rows_follow_their_masks(
    tree: Tree, text: int, seen: list[list[int]], window: int
) -> None:
    memory, q = random(2, 2, 12, KEYS, DIM), random(8 - text, HEADS, DIM)
    rows = slice(0, 8 - text)
    span = RowSpan(rows, text, 8, tree.visible_ends(text), Memory(list(range(12))), tree)
    expected = by_hand(q, memory[0, 1], memory[1, 1], [row[-window:] for row in seen])
    found = attend(memory, [span], q, AttentionWindow(window=window))
    torch.testing.assert_close(found, expected)


def test_rows_are_stored_before_attention() -> None:
    memory = torch.zeros(2, 2, 12, KEYS, DIM)
    q, k, v = random(5, HEADS, DIM), random(5, KEYS, DIM, seed=1), random(5, KEYS, DIM, seed=2)
    write = torch.tensor([3, 4, 9, 10, 11])
    spans = [
        RowSpan(slice(0, 2), 0, 2, [1, 2], Memory([3, 4])),
        RowSpan(slice(2, 5), 0, 3, None, Memory([9, 10, 11])),
    ]
    backend = DenseAttention(list(memory[0]), list(memory[1]), HEADS)
    out = backend.plan_pass(batch(spans, write.tolist()))(1, q, k, v)
    assert torch.equal(memory[0, 1, write], k) and torch.equal(memory[1, 1, write], v)
    assert not memory[:, 0].any() and not memory[:, 1, :3].any()
    seen = [[3], [3, 4], [9], [9, 10], [9, 10, 11]]
    torch.testing.assert_close(out, by_hand(q, memory[0, 1], memory[1, 1], seen))


def test_sinks_of_a_group_belong_to_their_heads() -> None:
    memory, q = random(2, 2, 32, KEYS, DIM), random(6, HEADS, DIM)
    pages = [Memory(list(range(16 * n, 16 * n + 16))) for n in range(2)]
    spans = [RowSpan(slice(3 * n, 3 * n + 3), 4, 7, None, each) for n, each in enumerate(pages)]
    seen = [each.slots[:end] for each in pages for end in (5, 6, 7)]
    sinks = torch.tensor([0.0, -3.0, 2.0, 9.0])
    found = attend(memory, spans, q, AttentionWindow(), sinks)
    torch.testing.assert_close(found, by_hand(q, memory[0, 1], memory[1, 1], seen, sinks))
