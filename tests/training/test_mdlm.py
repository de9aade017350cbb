"""Tests of masked diffusion: rows computed by hand for both shifts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import MASK, published
from outpace.attention.ranges import RangesAttention, dense_mask, find_documents, full_ranges
from outpace.checkpoints.checkpoint import translate_config
from outpace.models.transformer import Transformer
from outpace.training.data import Example
from outpace.training.objectives import MDLM
from outpace.training.rows import UNSCORED, Rows
from runs import scored_rows

EXAMPLE = Example(prompt=[5, 6], response=[7, 8, 9], marks=[False, True, False])
PLAIN = MDLM(shift=1, mask_id=MASK)


class Scripted:
    """A scripted random generator."""

    def __init__(self, *numbers: float | list[float]) -> None:
        self.numbers = list(numbers)

    def random(self, size: int | None = None) -> Any:
        number = self.numbers.pop(0)
        return np.array(number) if size is not None else number

    def choice(self, places: Sequence[int]) -> int:
        return places[int(self.numbers.pop(0))]

    def integers(self, low: int, high: int) -> int:
        return int(self.numbers.pop(0))


def rows_of(objective: MDLM, example: Example, *numbers: float | list[float]) -> Rows:
    return objective.rows(example, Scripted(*numbers))


@pytest.mark.parametrize("shift", [0, 1])
def test_uniform_rows_mask_with_probability_t_and_weigh_its_inverse(shift: int) -> None:
    objective = replace(PLAIN, shift=shift, least=0.5, mark_weight=3.0)
    # Kind, then t = 0.5 + 0.5 * 0.6 = 0.8, then one number a token: masked where below t.
    rows = rows_of(objective, EXAMPLE, 0.9, 0.6, [0.9, 0.7, 0.1])
    assert rows.ids.tolist() == [5, 6, 7, MASK, MASK]
    assert torch.equal(rows.ranges, full_ranges(5))
    assert scored_rows(rows) == {3 - shift: (8, 3.75), 4 - shift: (9, 1.25)}
    assert rows.normaliser == 5


def test_the_response_is_padded_with_its_end_to_the_canvas() -> None:
    rows = rows_of(replace(PLAIN, canvas=(4, 6)), EXAMPLE, 0.9, 5, 0.0, [1.0] * 5)
    assert rows.ids.tolist() == [5, 6, 7, 8, 9, 9, 9]
    unended = replace(EXAMPLE, ended=False)
    assert len(rows_of(replace(PLAIN, canvas=(4, 6)), unended, 0.9, 0.0, [1.0] * 3)) == 5


@pytest.mark.parametrize("shift", [0, 1])
def test_suffix_rows_mask_from_a_marked_token_to_the_end(shift: int) -> None:
    objective = replace(PLAIN, shift=shift, suffix=1.0, starts=1.0, floor=1.0, peak=0.0, short=0.0)
    rows = rows_of(objective, EXAMPLE, 0.0, 0.5, 0, 0.5)
    assert rows.ids.tolist() == [5, 6, 7, MASK, MASK]
    assert scored_rows(rows) == {3 - shift: (8, 1.0), 4 - shift: (9, 1.0)}
    assert rows.normaliser == 2


@pytest.mark.parametrize("shift", [0, 1])
def test_anchored_rows_share_one_clean_copy(shift: int) -> None:
    objective = replace(PLAIN, shift=shift, anchored=1.0, anchors=2, longest=2)
    # Two starts, at response slots 0 and 1; neither on purpose on a mark; then two masks each.
    rows = rows_of(objective, EXAMPLE, 0.0, 0.5, 0, 0.5, 1, 0.5, 0.0, 0.0)
    blocks = [[6][:shift] + [MASK, MASK], [7][:shift] + [MASK, MASK]]
    assert rows.ids.tolist() == [5, 6, 7, 8, 9, *blocks[0], *blocks[1]]
    first, second = (list(range(2 + start - shift, 4 + start)) for start in (0, 1))
    assert rows.positions.tolist() == [0, 1, 2, 3, 4, *first, *second]
    mask = dense_mask(rows.ranges, len(rows))
    size = 2 + shift
    for row in range(5):
        cut = next(end for end in (2 - shift, 3 - shift, 5) if end > row)
        assert mask[row].nonzero().flatten().tolist() == list(range(cut))
    for row in range(5, len(rows)):
        block = (row - 5) // size
        own = range(5 + block * size, 5 + (block + 1) * size)
        assert mask[row].nonzero().flatten().tolist() == [*range(2 + block - shift), *own]
    labels = [label for label, _ in scored_rows(rows).values()]
    assert labels == [7, 8, 8, 9]
    assert min(scored_rows(rows)) == 5
    assert find_documents(rows.ranges) == [(0, len(rows))]


def test_what_an_anchored_row_scores_does_not_reach_it() -> None:
    objective = MDLM(shift=1, mask_id=MASK, anchored=1.0, anchors=3, scored=0.5)
    torch.manual_seed(0)
    model = Transformer(translate_config(published("DreamModel", mask_token_id=MASK)))
    for seed in range(6):
        rows = objective.rows(EXAMPLE, np.random.default_rng(seed))
        for row, (_, _) in scored_rows(rows).items():
            slot = int(rows.positions[row]) + 1
            hidden = [
                model(ids, rows.positions, RangesAttention(rows.ranges))[row]
                for ids in (rows.ids, changed(rows, slot))
            ]
            assert torch.allclose(*hidden, atol=1e-6)


def changed(rows: Rows, slot: int) -> torch.Tensor:
    """The ids with another clean token in one slot of the shared copy."""
    ids = rows.ids.clone()
    ids[slot] = 1
    return ids


def test_all_kinds_score_the_token_of_the_slot_and_never_the_prompt() -> None:
    objective = MDLM(
        shift=1, mask_id=MASK, canvas=(4, 8), suffix=0.3, anchored=0.3, causal=0.2, scored=0.5
    )
    canvas = [*EXAMPLE.prompt, *EXAMPLE.response, *[9] * 8]
    for seed in range(100):
        rows = objective.rows(EXAMPLE, np.random.default_rng(seed))
        for row, (label, weight) in scored_rows(rows).items():
            slot = int(rows.positions[row]) + 1
            assert slot >= 2 and label == canvas[slot] and weight > 0


def test_a_shifted_model_is_never_asked_for_slot_zero() -> None:
    objective = MDLM(shift=1, mask_id=MASK, suffix=0.4, anchored=0.4, scored=0.5)
    bare = Example(prompt=[], response=[7, 8], marks=[True, False], ended=False)
    for seed in range(50):
        rows = objective.rows(bare, np.random.default_rng(seed))
        assert rows.ids[0] == 7
        assert set(rows.labels.tolist()) <= {8, UNSCORED}
