"""States of pipelined decoding, filled with true tokens, as the method itself goes through them."""

import numpy as np
import pytest
import torch

from helpers import MASK, diffusion_model
from outpace.attention.ranges import RangesAttention
from outpace.training.data import Example
from outpace.training.objective import Models, scored_places
from outpace.training.objectives import D2F
from outpace.training.objectives.d2f import Pipeline
from outpace.training.rows import UNSCORED, Response, Rows, pack_documents


def hidden(block: int, *responses: list[int], shift: int = 1) -> Rows:
    """Packed prompts of two tokens and responses of nothing but holes."""
    objective = D2F(block=block, shift=shift, mask_id=MASK)
    parts = []
    for response in responses:
        shares = np.ones(-(-len(response) // block))
        answer = Response.without_padding(np.array(response))
        parts.append(objective.noisy_rows([5, 6], answer, shares, np.zeros(len(response))))
    return pack_documents(parts)


def fill(pipeline: Pipeline, state: Rows, sure: dict[int, float]) -> None:
    """Score the open holes by the slot that each fills; the others less, the first best."""
    slots = (scored_places(state) + pipeline.shift).tolist()
    pipeline.fill_holes(torch.tensor([sure.get(slot, 0.1 - slot / 1000) for slot in slots]), 0.9)


@pytest.mark.parametrize("shift", [0, 1])
def test_blocks_are_appended_forced_and_filled(shift: int) -> None:
    rows = hidden(10, list(range(1, 22)) + [1] * 4, shift=shift)
    pipeline = Pipeline(rows, shift)
    state = pipeline.append_blocks()
    assert (scored_places(state) + shift).tolist() == list(range(2, 12))
    assert set(state.weights[scored_places(state)].tolist()) == {1.0}
    fill(pipeline, state, {4: 0.5})
    assert pipeline.unfilled.tolist() == [True, True, False] + [True] * 22, (
        "the first block is forced"
    )
    state = pipeline.append_blocks()
    assert state.ids[4] == 3 and int((state.ids == MASK).sum()) == 24
    assert (scored_places(state) + shift).tolist() == [2, 3, *range(5, 22)]
    weights = state.weights[scored_places(state)]
    assert weights[:9].tolist() == pytest.approx([10 / 9] * 9) and set(weights[9:].tolist()) == {1}
    fill(pipeline, state, {2: 0.95, 3: 0.91, 13: 0.8})
    assert int(pipeline.unfilled.sum()) == 22, "the second block is not"
    state = pipeline.append_blocks()
    assert len(scored_places(state)) == 17, "and nothing follows it while it is empty"
    fill(pipeline, state, dict.fromkeys(range(5, 12), 0.95) | {12: 0.99})
    state = pipeline.append_blocks()
    assert (scored_places(state) + shift).tolist() == list(range(13, 27))
    fill(pipeline, state, {14: 0.2, 24: 0.9})
    assert pipeline.unfilled.tolist() == [False] * 11 + [True, False] + [True] * 12


def test_responses_do_not_wait_for_each_other() -> None:
    rows = hidden(2, [1, 2, 3, 4], [5, 6, 7, 8, 9])
    pipeline = Pipeline(rows, 1)
    assert len(scored_places(pipeline.append_blocks())) == 4
    fill(pipeline, pipeline.append_blocks(), {2: 1.0, 3: 1.0})
    assert pipeline.unfilled.tolist() == [False, False, True, True, False, True, True, True, True]
    fill(pipeline, pipeline.append_blocks(), {4: 1.0, 5: 1.0})
    state = pipeline.append_blocks()
    assert state.labels[:6].tolist() == [UNSCORED] * 6
    assert (scored_places(state) + 1).tolist() == [10, 11]
    for _ in range(3):
        fill(pipeline, pipeline.append_blocks(), {})
    assert not len(scored_places(pipeline.append_blocks()))


def test_the_loss_is_the_mean_of_the_states() -> None:
    model = diffusion_model(seed=3)
    rows = hidden(4, [1, 2, 3, 4, 5], [6, 7, 8])
    objective = D2F(block=4, hard=1.0, unroll=3, confidence=1.0, shift=1, mask_id=MASK)
    pipeline, totals = Pipeline(rows, 1), []
    for _ in range(3):
        state = pipeline.append_blocks()
        places = scored_places(state)
        logits = model.compute_logits(
            model(state.ids, state.positions, RangesAttention(rows.ranges))
        )[places]
        losses = -logits.log_softmax(-1).gather(1, state.labels[places, None]).squeeze(1)
        totals.append(float((losses * state.weights[places]).sum()))
        pipeline.fill_holes(logits.softmax(-1).amax(-1), 1.0)
    loss = objective.loss(Models(model), rows)
    assert loss.total.item() == pytest.approx(sum(totals) / 3, rel=1e-5)
    hits, counted = loss.metrics["accuracy"]
    assert counted == 7 + 6 + 4 and 0 <= hits <= counted


def test_rows_of_an_unrolled_example_are_all_holes() -> None:
    objective = D2F(block=4, hard=1.0, unroll=50, shift=1, mask_id=MASK)
    example = Example(prompt=[5, 6], response=[7, 8, 9], marks=[False] * 3)
    rows = objective.rows(example, np.random.default_rng(0))
    assert rows.ids.tolist() == [5, 6, MASK, MASK, MASK] and rows.normaliser == 3
    loss = objective.loss(Models(diffusion_model()), rows)
    assert loss.metrics["accuracy"][1] <= 3 + 2 + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unroll": -1}, "unroll must be a whole number from 0 to 2147483647, got -1"),
        ({"unroll": 2, "easy": 0.5}, "set one of them to 0"),
        ({"confidence": 1.5}, "confidence must be a number from 0 to 1, got 1.5"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        D2F(**options)
