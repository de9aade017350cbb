"""Tests of discrete diffusion forcing: rows and losses, computed by hand for both shifts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import MASK, diffusion_model
from outpace.attention.ranges import RangesAttention, dense_mask
from outpace.training.data import Example
from outpace.training.objective import Models, build_teachers, reverse_kl, scored_places
from outpace.training.objectives import D2F
from outpace.training.objectives.d2f import Pipeline
from outpace.training.rows import UNSCORED, Rows, pack_documents
from runs import attend_where, plain_response, scored_rows

EXAMPLE = Example(prompt=[5, 6], response=[7, 8, 9, 4, 3], marks=[False, True, False, True, False])
PLAIN = D2F(block=2, shift=1, mask_id=MASK)


def noisy(objective: D2F, draws: list[float], shares: tuple[float, ...] = (0.5, 0.5, 0.8)) -> Rows:
    answer = plain_response(np.array(EXAMPLE.response))
    return objective.noisy_rows(EXAMPLE.prompt, answer, np.array(shares), np.array(draws))


@pytest.mark.parametrize("shift", [0, 1])
def test_blocks_see_the_prompt_what_is_before_them_and_themselves(shift: int) -> None:
    rows = noisy(replace(PLAIN, shift=shift), [0.9, 0.4, 0.6, 0.6, 0.7])
    assert rows.ids.tolist() == [5, 6, 7, MASK, 9, 4, MASK]
    sees = dense_mask(rows.ranges, len(rows)).sum(1).tolist()
    assert sees == [2, 2, 4, 4, 6, 6, 7]
    assert scored_rows(rows) == {3 - shift: (8, 2.0), 6 - shift: (3, 1.25)}
    assert rows.normaliser == 2


def test_shares_rise_and_keep_their_bounds() -> None:
    rng = np.random.default_rng(0)
    drawn = np.array([D2F().block_fractions(rng.random(), rng.random(4)) for _ in range(500)])
    assert bool((np.diff(drawn) >= 0).all())
    assert drawn.min() >= 0.2 and drawn.max() <= 0.7
    assert drawn[:, 0].mean() == pytest.approx(0.45, abs=0.02)
    assert drawn[:, -1].mean() == pytest.approx(0.575, abs=0.02)
    assert D2F(noise=(0.5, 0.5)).block_fractions(0.3, np.array([])) == [0.5]


def test_fractions_without_order_are_independent() -> None:
    drawn = D2F(monotone=False).block_fractions(0.5, np.array([0.0, 1.0]))
    assert drawn.tolist() == pytest.approx([0.45, 0.2, 0.7])


def test_marks_weigh_more() -> None:
    padded = replace(PLAIN, canvas=(9, 9), noise=(1.0, 1.0), mark_weight=3.0)
    every = padded.rows(EXAMPLE, np.random.default_rng(0))
    assert every.ids[2:].tolist() == [MASK] * 9
    weights = [weight for _, weight in scored_rows(every).values()]
    assert weights == [1, 3, 1, 3, 1, 1, 1, 1, 1] and every.normaliser == 13


@pytest.mark.parametrize("unroll", [0, 2])
@pytest.mark.parametrize("ended", [False, True])
def test_padding_may_stay_unmasked(ended: bool, unroll: int) -> None:
    objective = replace(PLAIN, canvas=(9, 9), noise=(1.0, 1.0), padding=False, unroll=unroll)
    rows = objective.rows(replace(EXAMPLE, ended=ended), np.random.default_rng(0))
    masks = 4 if ended else 5
    assert rows.ids[2:].tolist() == [MASK] * masks + [3] * 5 * ended
    assert rows.normaliser == masks


@pytest.mark.parametrize("adapted", [False, True])
def test_teacher_shares_weights_only_under_an_adapter(adapted: bool) -> None:
    student = diffusion_model()
    teacher = build_teachers(PLAIN, student, adapted)["teacher"]
    for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
        assert torch.equal(ours, theirs) and (ours is theirs) == adapted


def test_one_hole_is_always_scored_rows() -> None:
    assert list(scored_rows(noisy(PLAIN, [0.9, 0.8, 0.7, 0.99, 0.9]))) == [3]
    bare = replace(PLAIN, shift=1)
    answer = plain_response(np.array([7, 8]))
    rows = bare.noisy_rows([], answer, np.array([0.5]), np.array([0.1, 0.9]))
    assert rows.ids.tolist() == [7, MASK] and scored_rows(rows) == {0: (8, 2.0)}


def test_easy_examples_mask_what_is_not_marked_less() -> None:
    objective = replace(PLAIN, easy=1.0, noise=(0.5, 0.5))
    counts = np.zeros(5)
    for seed in range(600):
        counts += objective.rows(EXAMPLE, np.random.default_rng(seed)).ids[2:].numpy() == MASK
    share = counts / 600
    assert share[[1, 3]] == pytest.approx([0.5, 0.5], abs=0.06)
    assert share[[0, 2, 4]] == pytest.approx([0.25] * 3, abs=0.06)


@pytest.mark.parametrize("hard", [0.0, 0.25, 1.0])
def test_holes_learn_a_mixture_of_teacher_and_truth(hard: float) -> None:
    student, teacher = diffusion_model(seed=1), diffusion_model(seed=2)
    objective = replace(PLAIN, hard=hard)
    parts = [objective.rows(EXAMPLE, np.random.default_rng(seed)) for seed in range(3)]
    others = {"teacher": teacher} if objective.needs_teacher else {}
    loss = objective.loss(Models(student, others), pack_documents(parts)).total
    expected = sum(by_hand(objective, student, teacher, rows, hard) for rows in parts)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    # Held-out examples have the divergence: what the student could still learn of its teacher.
    floor = sum(by_hand(objective, teacher, teacher, rows, hard, full=True) for rows in parts)
    with torch.no_grad():
        held_out = objective.loss(Models(student, others), pack_documents(parts)).total
    assert held_out.item() == pytest.approx(expected - floor * (hard < 1), rel=1e-3)


def test_in_reverse_the_student_diverges_from_the_teacher() -> None:
    student, teacher = diffusion_model(seed=1), diffusion_model(seed=2)
    objective = replace(PLAIN, reverse=True)
    rows = objective.rows(EXAMPLE, np.random.default_rng(0))
    loss = objective.loss(Models(student, {"teacher": teacher}), pack_documents([rows])).total
    ours, theirs = both(student, teacher, rows)
    expected = sum(
        weight * float((says.exp() * (says - theirs[row].log_softmax(-1))).sum())
        for row, (_, weight) in scored_rows(rows).items()
        for says in [ours[row].log_softmax(-1)]
    )
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    doubtless = torch.tensor([[1.0, 0.0]])
    assert reverse_kl(torch.zeros(1, 2), doubtless).item() == pytest.approx(43, abs=1)
    assert reverse_kl(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 0.5]])).item() == 0


def both(student, teacher, rows: Rows) -> tuple[Tensor, Tensor]:
    """Logits of all rows, of the block-causal student and of the bidirectional teacher."""
    seen = dense_mask(rows.ranges, len(rows))
    ours, theirs = (
        model.compute_logits(model(rows.ids, rows.positions, attend_where(mask)))
        for model, mask in ((student, seen), (teacher, torch.ones_like(seen)))
    )
    return ours, theirs


def by_hand(
    objective: D2F, student, teacher, rows: Rows, hard: float, *, full: bool = False
) -> float:
    """The loss of one example, hole by hole; `full` is the entropy of its targets."""
    total = 0.0
    ours, theirs = both(student, teacher, rows)
    for row, (label, weight) in scored_rows(rows).items():
        targets = (1 - hard) * theirs[row].softmax(-1)
        targets[label] += hard
        logs = targets.clamp(min=1e-30).log() if full else ours[row].log_softmax(-1)
        total -= weight * float((targets * logs).sum())
    return total


def unfilled_rows(block: int, *responses: list[int], shift: int = 1) -> Rows:
    """Packed prompts of two tokens and responses of nothing but holes."""
    objective = D2F(block=block, shift=shift, mask_id=MASK)
    parts = []
    for response in responses:
        shares = np.ones(-(-len(response) // block))
        answer = plain_response(np.array(response))
        parts.append(objective.noisy_rows([5, 6], answer, shares, np.zeros(len(response))))
    return pack_documents(parts)


def fill(pipeline: Pipeline, state: Rows, sure: dict[int, float]) -> None:
    """Score the open holes by the slot that each fills; the others less, the first best."""
    slots = (scored_places(state) + pipeline.shift).tolist()
    pipeline.fill_holes(torch.tensor([sure.get(slot, 0.1 - slot / 1000) for slot in slots]), 0.9)


@pytest.mark.parametrize("shift", [0, 1])
def test_blocks_are_appended_forced_and_filled(shift: int) -> None:
    rows = unfilled_rows(10, list(range(1, 22)) + [1] * 4, shift=shift)
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
    rows = unfilled_rows(2, [1, 2, 3, 4], [5, 6, 7, 8, 9])
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
    rows = unfilled_rows(4, [1, 2, 3, 4, 5], [6, 7, 8])
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
