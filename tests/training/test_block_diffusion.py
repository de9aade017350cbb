"""Tests of block diffusion: rows and losses, computed by hand for both shifts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import MASK, block_model
from outpace.attention.ranges import dense_mask
from outpace.training.data import Example
from outpace.training.objective import Models
from outpace.training.objectives import BlockDiffusion
from outpace.training.rows import UNSCORED, Rows, pack_documents
from runs import attend_where, scored_rows

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
    draws = [0.0 if each == "_" else 1.0 for each in masked]
    t = (share - objective.least) / (1 - objective.least)
    return objective.rows(EXAMPLE, Drawn([t] * 3, draws))  # type: ignore[arg-type]


def test_masks_see_the_clean_blocks_before_theirs_and_their_own() -> None:
    rows = rows_of(PLAIN, "___" + "x_x" + "__x")
    assert rows.ids.tolist() == [5, 6, 2, 7, 8, 9, 4, 4, 4, 7, MASK, 9, MASK, MASK, 4]
    assert rows.positions.tolist() == [*range(9), *range(3, 9)]
    seen = dense_mask(rows.ranges, len(rows))
    assert seen.sum(1).tolist() == [3, 3, 3, 6, 6, 6, 9, 9, 9, 6, 6, 6, 9, 9, 9]
    assert seen[9:12, :3].all() and seen[9:12, 9:12].all()
    assert seen[12:, :6].all() and seen[12:, 12:].all()
    assert scored_rows(rows) == {10: (8, 2.0), 12: (4, 2.0), 13: (4, 2.0)}
    assert rows.normaliser == 6


def test_under_a_shift_the_row_before_scores() -> None:
    rows = rows_of(replace(PLAIN, shift=1), "___" + "__x" + "_xx")
    assert rows.ids.tolist()[9:] == [MASK, MASK, 9, MASK, 4, 4]
    assert scored_rows(rows) == {2: (7, 1.0), 5: (4, 1.0), 9: (8, 2.0), 11: (4, 2.0)}
    assert rows.normaliser == 6 + 2
    alone = rows_of(replace(PLAIN, shift=1, ahead=0.0), "___" + "__x" + "_xx")
    assert scored_rows(alone) == {9: (8, 2.0), 11: (4, 2.0)} and alone.normaliser == 6


def test_a_complement_masks_what_the_other_stream_does_not() -> None:
    objective = replace(PLAIN, weighting="uniform", complement=True, mark_weight=3.0)
    rows = rows_of(replace(objective, end_weight=0.5), "xxx" + "_xx" + "xx_")
    assert rows.ids.tolist()[9:] == [MASK, 8, 9, 4, 4, MASK, 7, MASK, MASK, MASK, MASK, 4]
    labels = sorted(scored_rows(rows).values())
    assert labels == [(4, 0.5), (4, 0.5), (4, 1.0), (7, 1.0), (8, 3.0), (9, 1.0)]
    assert rows.normaliser == sum(weight for _, weight in labels)
    alone = rows_of(replace(objective, complement=False), "xxx" + "_xx" + "xx_")
    assert alone.normaliser == pytest.approx(8 * 0.5005) and len(scored_rows(alone)) == 2


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
        slots = torch.arange(len(ids))
        seen = slots[:, None] // 3 >= slots // 3
        logits = model.compute_logits(model(ids, slots, attend_where(seen)))
        for slot in holes:
            total -= 2 * float(logits[slot - shift].log_softmax(-1)[text[slot]])
    assert loss == pytest.approx(2 * total, rel=1e-4)
