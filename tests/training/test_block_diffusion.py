"""Tests of block diffusion: rows and losses, computed by hand for both shifts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import MASK, block_model, causal_model, diffusion_model
from outpace.attention.ranges import dense_mask
from outpace.models.attention import Attend
from outpace.training.data import Example
from outpace.training.objective import Models
from outpace.training.objectives import BlockDiffusion
from outpace.training.rows import UNSCORED, Rows, pack_documents

EXAMPLE = Example(
    prompt=[5, 6, 2], response=[7, 8, 9, 4], marks=[False, True, False, False], ended=True
)
PLAIN = BlockDiffusion(block=3, shift=0, mask_id=MASK)


class Drawn:
    """A scripted generator: given draws, then shares that mask everything or nothing."""

    def __init__(self, *draws: list[float]) -> None:
        self.draws = list(draws)

    def random(self, size: int) -> np.ndarray:
        found = np.array(self.draws.pop(0))
        assert len(found) == size
        return found

    def integers(self, low: int, high: int) -> int:
        assert high == low + 1
        return low


def rows_of(objective: BlockDiffusion, masked: str, share: float = 0.5) -> Rows:
    """Rows of the example where `_` is masked, under one share for all blocks."""
    draws = [0.0 if each == "_" else 1.0 for each in masked]
    t = (share - objective.least) / (1 - objective.least)
    return objective.rows(EXAMPLE, Drawn([t] * 3, draws))  # type: ignore[arg-type]


def scored(rows: Rows) -> dict[int, tuple[int, float]]:
    """Row to label and weight, where scored."""
    table = zip(rows.labels.tolist(), rows.weights.tolist(), strict=True)
    return {r: (label, round(w, 4)) for r, (label, w) in enumerate(table) if label != UNSCORED}


def test_masks_see_the_clean_blocks_before_theirs_and_their_own() -> None:
    rows = rows_of(PLAIN, "___" + "x_x" + "__x")
    assert rows.ids.tolist() == [5, 6, 2, 7, 8, 9, 4, 4, 4, 7, MASK, 9, MASK, MASK, 4]
    assert rows.positions.tolist() == [*range(9), *range(3, 9)]
    seen = dense_mask(rows.ranges, len(rows))
    assert seen.sum(1).tolist() == [3, 3, 3, 6, 6, 6, 9, 9, 9, 6, 6, 6, 9, 9, 9]
    assert seen[9:12, :3].all() and seen[9:12, 9:12].all()
    assert seen[12:, :6].all() and seen[12:, 12:].all()
    assert scored(rows) == {10: (8, 2.0), 12: (4, 2.0), 13: (4, 2.0)}
    assert rows.normaliser == 6


def test_under_a_shift_the_row_before_scores() -> None:
    rows = rows_of(replace(PLAIN, shift=1), "___" + "__x" + "_xx")
    assert rows.ids.tolist()[9:] == [MASK, MASK, 9, MASK, 4, 4]
    assert scored(rows) == {2: (7, 1.0), 5: (4, 1.0), 9: (8, 2.0), 11: (4, 2.0)}
    assert rows.normaliser == 6 + 2
    alone = rows_of(replace(PLAIN, shift=1, ahead=0.0), "___" + "__x" + "_xx")
    assert scored(alone) == {9: (8, 2.0), 11: (4, 2.0)} and alone.normaliser == 6


def test_a_complement_masks_what_the_other_stream_does_not() -> None:
    objective = replace(PLAIN, weighting="uniform", complement=True, mark_weight=3.0)
    rows = rows_of(replace(objective, end_weight=0.5), "xxx" + "_xx" + "xx_")
    assert rows.ids.tolist()[9:] == [MASK, 8, 9, 4, 4, MASK, 7, MASK, MASK, MASK, MASK, 4]
    labels = sorted(scored(rows).values())
    assert labels == [(4, 0.5), (4, 0.5), (4, 1.0), (7, 1.0), (8, 3.0), (9, 1.0)]
    assert rows.normaliser == sum(weight for _, weight in labels)
    alone = rows_of(replace(objective, complement=False), "xxx" + "_xx" + "xx_")
    assert alone.normaliser == pytest.approx(8 * 0.5005) and len(scored(alone)) == 2


@pytest.mark.nightly
def test_the_mass_is_what_weights_add_up_to_on_average() -> None:
    for objective in (
        replace(PLAIN, least=0.1),
        replace(PLAIN, shift=1, weighting="uniform", mark_weight=2.0),
    ):
        rows = [objective.rows(EXAMPLE, np.random.default_rng(seed)) for seed in range(3000)]
        total = np.mean([float(each.weights[each.labels != UNSCORED].sum()) for each in rows])
        # Under a shift a first token is not scored where the block before it has no mask.
        lost = 1 / 2 + 1 / 2 * 1 / 4 if objective.shift else 0.0
        assert total == pytest.approx(rows[0].normaliser - lost, rel=0.03)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_loss_is_that_of_each_block_alone(shift: int) -> None:
    model = block_model(seed=1, shift=shift)
    objective = BlockDiffusion(block=3, ahead=0.0).bind(model.config)
    rows = rows_of(objective, "xxx" + "x_x" + "x__")
    loss = objective.loss(Models(model), pack_documents([rows, rows])).total.item()
    text = [5, 6, 2, 7, 8, 9, 4, 4, 4]
    total = 0.0
    for begin, shown, holes in ((3, [7, MASK, 9], [4]), (6, [4, MASK, MASK], [7, 8])):
        ids = torch.tensor(text[:begin] + shown)
        logits = model.compute_logits(model(ids, torch.arange(len(ids)), blocks_of(len(ids), 3)))
        for slot in holes:
            total -= 2 * float(logits[slot - shift].log_softmax(-1)[text[slot]])
    assert loss == pytest.approx(2 * total, rel=1e-4)


def blocks_of(length: int, size: int) -> Attend:
    """Attention of rows to their block and those before it."""
    number = torch.arange(length) // size
    mask = number[:, None] >= number

    def attend(layer: int, q, k, v):
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        weights = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = weights.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return attend


def test_it_takes_what_it_must_know_from_the_model() -> None:
    bound = BlockDiffusion().bind(block_model(shift=1).config)
    assert (bound.block, bound.shift, bound.mask_id) == (8, 1, MASK)
    assert BlockDiffusion(block=2).bind(block_model().config).block == 2
    for model in (diffusion_model(), causal_model()):
        with pytest.raises(ValueError, match="^block_diffusion"):
            BlockDiffusion().bind(model.config)
    with pytest.raises(ValueError, match="^block"):
        BlockDiffusion().bind(block_model(block_size=None).config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block must be a whole number from 1 to 2147483647, got 0"),
        ({"least": 0.0}, "least must be a number above 0 and below 1, got 0"),
        ({"weighting": "even"}, "weighting must be inverse or uniform, got 'even'"),
        ({"complement": True}, "complement needs weighting uniform"),
        ({"ahead": -1.0}, "ahead must be a number from 0 to 1000000, got -1"),
        ({"mark_weight": float("nan")}, "mark_weight must be a number from 0 to 1000000, got nan"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockDiffusion(**options)
