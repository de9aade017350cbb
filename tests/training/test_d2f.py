"""Tests of discrete diffusion forcing: rows and losses, computed by hand for both shifts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import MASK, causal_model, diffusion_model
from outpace.attention.ranges import dense_mask
from outpace.models.attention import Attend
from outpace.training.data import Example
from outpace.training.objective import Models, build_teachers, reverse_kl
from outpace.training.objectives import D2F
from outpace.training.rows import UNSCORED, Response, Rows, pack_documents

EXAMPLE = Example(prompt=[5, 6], response=[7, 8, 9, 4, 3], marks=[False, True, False, True, False])
PLAIN = D2F(block=2, shift=1, mask_id=MASK)


def scored(rows: Rows) -> dict[int, tuple[int, float]]:
    """Row to label and weight, where scored."""
    table = zip(rows.labels.tolist(), rows.weights.tolist(), strict=True)
    return {r: (label, round(w, 4)) for r, (label, w) in enumerate(table) if label != UNSCORED}


def noisy(objective: D2F, draws: list[float], shares: tuple[float, ...] = (0.5, 0.5, 0.8)) -> Rows:
    """Rows of the example from what would be drawn."""
    answer = Response.without_padding(np.array(EXAMPLE.response))
    return objective.noisy_rows(EXAMPLE.prompt, answer, np.array(shares), np.array(draws))


@pytest.mark.parametrize("shift", [0, 1])
def test_blocks_see_the_prompt_what_is_before_them_and_themselves(shift: int) -> None:
    rows = noisy(replace(PLAIN, shift=shift), [0.9, 0.4, 0.6, 0.6, 0.7])
    assert rows.ids.tolist() == [5, 6, 7, MASK, 9, 4, MASK]
    sees = dense_mask(rows.ranges, len(rows)).sum(1).tolist()
    assert sees == [2, 2, 4, 4, 6, 6, 7]
    assert scored(rows) == {3 - shift: (8, 2.0), 6 - shift: (3, 1.25)}
    assert rows.normaliser == 2


def test_shares_rise_and_keep_their_bounds() -> None:
    rng = np.random.default_rng(0)
    drawn = np.array([D2F().block_fractions(rng.random(), rng.random(4)) for _ in range(2000)])
    assert bool((np.diff(drawn) >= 0).all())
    assert drawn.min() >= 0.2 and drawn.max() <= 0.7
    assert drawn[:, 0].mean() == pytest.approx(0.45, abs=0.01)
    assert drawn[:, -1].mean() == pytest.approx(0.575, abs=0.01)
    assert D2F(noise=(0.5, 0.5)).block_fractions(0.3, np.array([])) == [0.5]


def test_fractions_without_order_are_independent() -> None:
    drawn = D2F(monotone=False).block_fractions(0.5, np.array([0.0, 1.0]))
    assert drawn.tolist() == pytest.approx([0.45, 0.2, 0.7])


def test_marks_weigh_more_and_blocks_of_padding_may_be_left_out() -> None:
    padded = replace(PLAIN, canvas=(9, 9), noise=(1.0, 1.0), mark_weight=3.0)
    every, some = (
        replace(padded, end_blocks=wanted).rows(EXAMPLE, np.random.default_rng(0))
        for wanted in (True, False)
    )
    assert torch.equal(every.ids, some.ids) and every.ids[2:].tolist() == [MASK] * 9
    weights = [weight for _, weight in scored(every).values()]
    assert weights == [1, 3, 1, 3, 1, 1, 1, 1, 1] and every.normaliser == 13
    assert [label for label, _ in scored(some).values()] == [7, 8, 9, 4, 3, 3]


@pytest.mark.parametrize("adapted", [False, True])
def test_teacher_shares_weights_only_under_an_adapter(adapted: bool) -> None:
    student = diffusion_model()
    teacher = build_teachers(PLAIN, student, adapted)["teacher"]
    for ours, theirs in zip(student.parameters(), teacher.parameters(), strict=True):
        assert torch.equal(ours, theirs) and (ours is theirs) == adapted


def test_one_hole_is_always_scored() -> None:
    assert list(scored(noisy(PLAIN, [0.9, 0.8, 0.7, 0.99, 0.9]))) == [3]
    bare = replace(PLAIN, shift=1)
    answer = Response.without_padding(np.array([7, 8]))
    rows = bare.noisy_rows([], answer, np.array([0.5]), np.array([0.1, 0.9]))
    assert rows.ids.tolist() == [7, MASK] and scored(rows) == {0: (8, 2.0)}


def test_easy_examples_mask_what_is_not_marked_less() -> None:
    objective = replace(PLAIN, easy=1.0, noise=(0.5, 0.5))
    counts = np.zeros(5)
    for seed in range(2000):
        counts += objective.rows(EXAMPLE, np.random.default_rng(seed)).ids[2:].numpy() == MASK
    share = counts / 2000
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


def test_in_reverse_the_student_diverges_from_the_teacher() -> None:
    student, teacher = diffusion_model(seed=1), diffusion_model(seed=2)
    objective = replace(PLAIN, reverse=True)
    rows = objective.rows(EXAMPLE, np.random.default_rng(0))
    loss = objective.loss(Models(student, {"teacher": teacher}), pack_documents([rows])).total
    ours, theirs = both(student, teacher, rows)
    expected = sum(
        weight * float((says.exp() * (says - theirs[row].log_softmax(-1))).sum())
        for row, (_, weight) in scored(rows).items()
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
        model.compute_logits(model(rows.ids, rows.positions, masked(mask)))
        for model, mask in ((student, seen), (teacher, torch.ones_like(seen)))
    )
    return ours, theirs


def by_hand(objective: D2F, student, teacher, rows: Rows, hard: float) -> float:
    """The loss of one example, hole by hole."""
    total = 0.0
    ours, theirs = both(student, teacher, rows)
    for row, (label, weight) in scored(rows).items():
        says = ours[row].log_softmax(-1)
        soft = -(theirs[row].softmax(-1) * says).sum()
        total += weight * float((1 - hard) * soft - hard * says[label])
    return total


def masked(mask: torch.Tensor) -> Attend:
    """Attention of one document under a dense mask."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attend


def test_shift_and_mask_come_from_the_model() -> None:
    assert D2F().bind(diffusion_model().config) == D2F(shift=1, mask_id=MASK)
    with pytest.raises(ValueError, match="Qwen2ForCausalLM"):
        D2F().bind(causal_model().config)
    with pytest.raises(ValueError, match="^block .*160"):
        D2F(block=160).bind(diffusion_model().config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block must be a whole number from 1 to 2147483647, got 0"),
        ({"noise": (0.0, 0.7)}, "noise must be two fractions above 0"),
        ({"noise": (0.7, 0.2)}, r"got \(0\.7, 0\.2\)"),
        ({"hard": 1.5}, r"hard must be a number from 0 to 1, got 1\.5"),
        ({"easy": -0.5}, "easy must be a number from 0 to 1, got -0.5"),
        ({"canvas": (5, 3)}, "canvas must be a minimum length"),
        ({"unroll": 2, "monotone": False}, "monotone = false cannot be combined with unroll"),
        ({"reverse": True, "hard": 0.5}, r"hard must be 0 with reverse, got 0\.5"),
    ],
)
def test_options_out_of_bounds_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        D2F(**options)
