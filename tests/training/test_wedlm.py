"""Tests of WeDLM: rows of both streams, computed by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import MASK, published, random_model
from outpace.attention.ranges import RangesAttention, dense_mask
from outpace.training.data import Example
from outpace.training.objective import Models
from outpace.training.objectives import WeDLM
from outpace.training.rows import UNSCORED, Rows, join_rows, next_token_rows, pack_documents

EXAMPLE = Example(prompt=[5, 6], response=[7, 8, 9], marks=[False, True, False])
PLAIN = WeDLM(block=4, mask_id=MASK, length=160)
CONFIG = published("WeDLMForCausalLM", mask_token_id=MASK)


def stream(objective: WeDLM, masked: list[int], ratios: list[float]) -> Rows:
    """The masked stream of the example after its clean one, with these masks and fractions."""
    tokens = np.array([*EXAMPLE.prompt, *EXAMPLE.response])
    blocks, holes = np.arange(5) // objective.block, np.isin(np.arange(5), masked)
    worth = np.array([0.0, 0.0, 1.0, objective.mark_weight, 1.0])
    return objective.masked_stream(tokens, worth, blocks, holes, np.array(ratios)[blocks], begin=5)


def seen(rows: Rows, begin: int) -> list[list[int]]:
    """The keys that each row sees; `begin` rows lie before them."""
    return [row.nonzero().flatten().tolist() for row in dense_mask(rows.ranges, begin + len(rows))]


def test_what_is_known_moves_in_front_of_the_masks_of_its_block() -> None:
    rows = stream(replace(PLAIN, mark_weight=3.0), masked=[2, 4], ratios=[0.5, 1.0])
    assert rows.ids.tolist() == [5, 6, 8, MASK, MASK]
    assert rows.positions.tolist() == [0, 1, 3, 2, 4]
    # The first block sees itself alone, the second the clean text before it (slots 0 to 3).
    own = [[5], [5, 6], [5, 6, 7], [5, 6, 7, 8]]
    assert seen(rows, 5) == [*own, [0, 1, 2, 3, 9]]
    assert rows.labels.tolist() == [UNSCORED, UNSCORED, UNSCORED, 7, 9]
    assert rows.weights.tolist() == pytest.approx([0, 0, 0, 2, 1])
    assert rows.normaliser == 5


def test_rows_that_are_not_causal_see_their_block() -> None:
    rows = stream(replace(PLAIN, causal=False), masked=[2, 4], ratios=[0.5, 1.0])
    assert seen(rows, 5) == [[5, 6, 7, 8]] * 4 + [[0, 1, 2, 3, 9]]


def test_blocks_without_a_mask_are_left_out() -> None:
    rows = stream(PLAIN, masked=[4], ratios=[0.1, 0.5])
    assert (rows.ids.tolist(), rows.positions.tolist()) == ([MASK], [4])
    assert seen(rows, 5) == [[0, 1, 2, 3, 5]]
    assert len(stream(PLAIN, masked=[], ratios=[0.1, 0.1])) == 0


@given(
    st.integers(1, 40),
    st.integers(0, 30),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_block_masks_exactly_its_share(
    tokens: int, given_: int, block: int, aligned: bool, per_block: bool, seed: int
) -> None:
    objective = replace(PLAIN, block=block, per_block=per_block)
    total = tokens + given_
    blocks = (np.arange(total) + (0 if aligned else block // 2)) // block
    masked, ratios = objective.draw_masks(blocks, given_, np.random.default_rng(seed))
    assert not masked[:given_].any()
    for each in set(blocks.tolist()):
        inside = blocks == each
        assert len(set(ratios[inside])) == 1
        count = int((inside & (np.arange(total) >= given_)).sum())
        assert masked[inside].sum() == round(count * ratios[inside][0])
    assert per_block or len(set(ratios)) == 1


@given(
    st.integers(0, 99), st.booleans(), st.lists(st.integers(1, 5), min_size=1), st.integers(0, 9)
)
def test_rows_score_each_mask_on_the_token_of_its_position(
    seed: int, aligned: bool, sizes: list[int], ends: int
) -> None:
    objective = replace(PLAIN, aligned=aligned, ends=ends, block=tuple(sizes))
    rows = objective.rows(EXAMPLE, np.random.default_rng(seed))
    text = [*EXAMPLE.prompt, *EXAMPLE.response, *[9] * ends]
    assert rows.ids[: len(text)].tolist() == text
    mask = dense_mask(rows.ranges, len(rows))
    for row in range(len(text), len(rows)):
        position = int(rows.positions[row])
        hole = int(rows.ids[row]) == MASK
        assert int(rows.labels[row]) == (text[position] if hole else UNSCORED)
        assert (float(rows.weights[row]) > 0) == hole
        assert hole or int(rows.ids[row]) == text[position]
        keys = mask[row].nonzero().flatten().tolist()
        before = [key for key in keys if key < len(text)]
        own = [key for key in keys if key >= len(text)]
        # Clean text up to the block, then the block, of which each position is seen once.
        assert before == list(range(len(before)))
        assert own == list(range(own[0], row + 1))
        assert min(rows.positions[own].tolist()) >= len(before)
        assert position < len(before) + max(sizes)
        known = [int(rows.ids[key]) != MASK for key in own]
        assert known == sorted(known, reverse=True)


def test_what_a_mask_scores_does_not_reach_it() -> None:
    objective = replace(PLAIN, block=(1, 2, 3))
    model = random_model(CONFIG)
    for seed in range(6):
        rows = objective.rows(EXAMPLE, np.random.default_rng(seed))
        for row in range(5, len(rows)):
            if rows.ids[row] != MASK:
                continue
            ids = rows.ids.clone()
            ids[int(rows.positions[row])] = 1
            hidden = [
                model(each, rows.positions, RangesAttention(rows.ranges))[row]
                for each in (rows.ids, ids)
            ]
            assert torch.allclose(*hidden, atol=1e-6)


def test_ends_stand_behind_a_response_that_ends_as_far_as_the_model_knows() -> None:
    objective = replace(PLAIN, ends=4, length=7, end_weight=0.5, ratios=(1.0, 1.0), block=8)
    rows = objective.rows(EXAMPLE, np.random.default_rng(0))
    assert rows.ids[:7].tolist() == [5, 6, 7, 8, 9, 9, 9]
    assert rows.weights[7:].tolist() == pytest.approx([0, 0, 1, 1, 1, 0.5, 0.5])
    assert rows.normaliser == 4
    cut = objective.rows(replace(EXAMPLE, ended=False), np.random.default_rng(0))
    assert cut.ids[:5].tolist() == [5, 6, 7, 8, 9] and cut.ids[5].tolist() == 5


@pytest.mark.parametrize("weighting", ["normalised", "inverse", "uniform"])
def test_the_loss_is_the_mean_of_masks_and_of_next_tokens(weighting: str) -> None:
    objective = replace(PLAIN, weighting=weighting, ar_weight=0.5)
    model = random_model(CONFIG)
    text = next_token_rows(np.array([5, 6, 7, 8, 9]), np.array([0.0, 0.0, 1.0, 1.0, 1.0]))
    text.normaliser = 0.0  # the masks' counts for both
    rows = join_rows([text, stream(objective, masked=[2, 4], ratios=[0.25, 0.5])])
    hidden = model(rows.ids, rows.positions, RangesAttention(rows.ranges))
    surprise = -model.compute_logits(hidden).log_softmax(-1)
    masks = {8: (7, 4.0), 9: (9, 2.0)}
    weights = {row: 1.0 if weighting == "uniform" else w for row, (_, w) in masks.items()}
    over = 3.0 if weighting == "inverse" else sum(weights.values())
    filled = sum(float(surprise[row, masks[row][0]]) * w for row, w in weights.items()) / over
    following = sum(float(surprise[row, token]) for row, token in ((1, 7), (2, 8), (3, 9))) / 3
    loss = objective.loss(Models(model), pack_documents([rows]))
    assert float(loss.total.detach()) / rows.normaliser == pytest.approx(
        (filled + 0.5 * following) / 1.5
    )
    both = replace(objective, ar_weight=0.0).loss(Models(model), pack_documents([rows]))
    assert float(both.total.detach()) / rows.normaliser == pytest.approx(filled)


def test_a_batch_without_a_mask_learns_the_text() -> None:
    objective = replace(PLAIN, ratios=(0.0, 0.0))
    loss = objective.loss(
        Models(random_model(CONFIG)),
        pack_documents([objective.rows(EXAMPLE, np.random.default_rng(0))]),
    )
    assert float(loss.total.detach()) > 0
