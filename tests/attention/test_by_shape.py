"""Layers of two shapes attend as each would with a back end for its shape alone."""

from __future__ import annotations

import pytest
import torch

from outpace.attention.batch import AttentionBatch
from outpace.attention.by_shape import ShapedAttention, backend_by_shape
from outpace.attention.choice import BACKEND_NAMES, select_backend
from outpace.attention.dense import DenseAttention
from outpace.engine.cache import PAGE_SIZE
from outpace.errors import OptionError
from outpace.models.config import AttentionWindow
from spans import TREE, random, spans_of

HEADS, SIZE = 8, 96
SHAPES = [(2, 64), (4, 32), (2, 64)]
SIGHTS = [AttentionWindow(window=9, causal=True), AttentionWindow(), AttentionWindow()]
ASKED = [(60, 1, "causal"), (9, 16, "causal"), (3, 4, "causal")]


@pytest.mark.parametrize("pattern", ["causal", TREE])
@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_layers_of_two_shapes(name: str, pattern: object) -> None:
    asked = [*ASKED, (70, 8, pattern)]
    spans = spans_of(asked, SIZE)
    memory = [
        random(2, heads, len(asked) * SIZE, size, seed=layer).transpose(1, 2)
        for layer, (heads, size) in enumerate(SHAPES)
    ]
    keys, values = ([each[part] for each in memory] for part in (0, 1))
    try:
        ours = backend_by_shape(
            *(keys, values, SIGHTS),
            lambda keys, values, sights: select_backend(
                name, keys, values, HEADS, sights, page=PAGE_SIZE, double=False
            ),
        )
    except OptionError as error:
        pytest.skip(str(error))
    assert isinstance(ours, ShapedAttention)
    rows = spans[-1].rows.stop
    write = torch.from_numpy(spans[0].pages.physical_slots(rows))
    numbers = [torch.from_numpy(each) for each in ours.plan_arrays(spans)]
    assert len(numbers) in (0, ours.num_arrays)
    none = torch.zeros(0, dtype=torch.int64)
    attend = ours.plan_pass(AttentionBatch(none, none, write, None, spans, plan_arrays=numbers))
    for layer, (_, size) in enumerate(SHAPES):
        q = random(rows, HEADS, size, seed=7)
        nothing = q.new_zeros(rows, 0, size)
        before = keys[layer].clone(), values[layer].clone()
        got = attend(layer, q, nothing, nothing)
        assert torch.equal(keys[layer], before[0]) and torch.equal(values[layer], before[1])
        exact = DenseAttention([keys[layer]], [values[layer]], HEADS, [SIGHTS[layer]])
        batch = AttentionBatch(none, none, write, None, spans)
        wanted = exact.plan_pass(batch)(0, q, nothing, nothing)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)
