"""Tests of objectives: options, models, packing, and logits of a few rows at a time."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from numpy.random import default_rng

from helpers import (
    MASK,
    block_model,
    causal_model,
    diffusion_model,
    masked_model,
    published,
    unshifted_model,
)
from outpace.attention.ranges import causal_ranges, full_ranges
from outpace.models.transformer import Transformer
from outpace.training import objective, weights
from outpace.training.data import Example
from outpace.training.lora import LoRA
from outpace.training.objective import Models, Objective, build_teachers
from outpace.training.objectives import D2F, MDLM, SFT, BlockDiffusion, DFlash, Eagle3, WeDLM
from outpace.training.rows import UNSCORED, Rows, pack_documents
from runs import PeakMemory

VOCAB = 6000
CASES = {
    "sft": ("Qwen2ForCausalLM", SFT()),
    "wedlm": ("WeDLMForCausalLM", WeDLM()),
    "mdlm": ("DreamModel", MDLM()),
    "d2f": ("DreamModel", D2F(block=8, hard=0.3)),
}


def seen(architecture: str, wanted: Objective) -> tuple[float, float, torch.Tensor, int]:
    changes = {} if architecture.startswith("Qwen") else {"mask_token_id": MASK}
    model = weights.random_model(published(architecture, vocab_size=VOCAB, **changes), 0)
    bound = wanted.bind(model.config)
    texts = [Example([3, 4], [5 + n] * 60, [False] * 60) for n in range(3)]
    rows = pack_documents([bound.rows(text, default_rng(n)) for n, text in enumerate(texts)])
    models = Models(model, build_teachers(bound, model, adapted=False))
    with PeakMemory() as memory:
        loss = bound.loss(models, rows)
        loss.total.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    hits = float(loss.metrics["accuracy"][0])
    return float(loss.total.detach()), hits, gradient, memory.peak


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, hits, gradient, size = seen(*CASES[name])
    monkeypatch.setattr(objective, "ENTRIES", 7 * VOCAB)
    cut = seen(*CASES[name])
    assert cut[0] == pytest.approx(loss, rel=1e-6) and cut[1] == hits
    assert torch.allclose(cut[2], gradient, atol=1e-6, rtol=1e-4)
    assert cut[3] < 0.8 * size


EXAMPLE = Example(prompt=[5, 6], response=[7, 8, 9], marks=[False, True, False])


@pytest.mark.parametrize(
    ("options", "labels", "weights"),
    [
        ({}, [UNSCORED, 7, 8, 9, UNSCORED], [0, 1, 1, 1, 0]),
        ({"prompt_weight": 0.5, "mark_weight": 2.0}, [6, 7, 8, 9, UNSCORED], [0.5, 1, 2, 1, 0]),
    ],
)
def test_sft_scores_the_next_token(
    options: dict[str, float], labels: list[int], weights: list[float]
) -> None:
    rows = SFT(**options).rows(EXAMPLE, default_rng(0))
    assert rows.ids.tolist() == [5, 6, 7, 8, 9]
    assert rows.positions.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(rows.ranges, causal_ranges(5))
    assert (rows.labels.tolist(), rows.weights.tolist()) == (labels, weights)
    assert rows.normaliser == sum(weights)


def test_packed_documents_are_sorted_by_length_and_their_ranges_moved() -> None:
    def document(ids: list[int], ranges: torch.Tensor) -> Rows:
        size, labels = len(ids), torch.tensor(ids) + 100
        ones = torch.ones(size)
        return Rows(torch.tensor(ids), torch.arange(size), ranges, labels, ones, float(size))

    packed = pack_documents(
        [document([1, 2, 3], full_ranges(3)), document([4, 5], causal_ranges(2))]
    )
    assert packed.ids.tolist() == [4, 5, 1, 2, 3]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2]
    assert packed.ranges[:, 0].tolist() == [[0, 1], [0, 2], [2, 5], [2, 5], [2, 5]]
    assert packed.labels.tolist() == [104, 105, 101, 102, 103]
    assert packed.normaliser == 5
    with pytest.raises(ValueError, match="rows"):
        pack_documents([])


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (BlockDiffusion, {"weighting": "even"}, "weighting"),
        (BlockDiffusion, {"complement": True}, "complement"),
        (D2F, {"noise": (0.0, 0.7)}, "noise"),
        (D2F, {"noise": (0.7, 0.2)}, "noise"),
        (D2F, {"canvas": (5, 3)}, "canvas"),
        (D2F, {"unroll": 2, "easy": 0.5}, "easy"),
        (D2F, {"unroll": 2, "monotone": False}, "monotone"),
        (D2F, {"reverse": True, "hard": 0.5}, "hard"),
        (DFlash, {"anchors": 0}, "anchors"),
        (Eagle3, {"discount": 1.5}, "discount"),
        (LoRA, {"dropout": 1.0}, "dropout"),
        (MDLM, {"suffix": 0.7, "causal": 0.7}, "suffix"),
        (MDLM, {"canvas": (5, 3)}, "canvas"),
        (WeDLM, {"block": ()}, "block"),
        (WeDLM, {"ratios": (0.5, 0.2)}, "ratios"),
        (WeDLM, {"weighting": "none"}, "weighting"),
    ],
)
def test_invalid_options_are_refused(
    kind: type[Objective | LoRA], options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        kind(**options)


@pytest.mark.parametrize(
    ("wanted", "model", "name"),
    [
        (SFT(), diffusion_model(), None),
        (SFT(), unshifted_model(), "mdlm"),
        (MDLM(), causal_model(), "mask"),
        (MDLM(causal=0.1), unshifted_model(), "shift"),
        (D2F(), causal_model(), "Qwen2ForCausalLM"),
        (D2F(block=160), diffusion_model(), "block"),
        (WeDLM(), causal_model(), "mask"),
        (WeDLM(), diffusion_model(), "causal"),
        (WeDLM(mask_id=3), causal_model(), None),
        (BlockDiffusion(), diffusion_model(), "block_diffusion"),
        (BlockDiffusion(), causal_model(), "block_diffusion"),
        (BlockDiffusion(), block_model(block_size=None), "block"),
        (Eagle3(), causal_model(), "eagle3"),
    ],
)
def test_objectives_refuse_other_models(
    wanted: Objective, model: Transformer, name: str | None
) -> None:
    with nullcontext() if name is None else pytest.raises(ValueError, match=rf"\b{name}\b"):
        wanted.bind(model.config)


@pytest.mark.parametrize(
    ("wanted", "model", "bound"),
    [
        (MDLM(), diffusion_model(), MDLM(shift=1, mask_id=MASK)),
        (D2F(), diffusion_model(), D2F(shift=1, mask_id=MASK)),
        (WeDLM(), masked_model(), WeDLM(mask_id=MASK, length=160)),
        (BlockDiffusion(), block_model(shift=1), BlockDiffusion(block=8, shift=1, mask_id=MASK)),
    ],
)
def test_model_sets_mask_and_shift(wanted: Objective, model: Transformer, bound: Objective) -> None:
    assert wanted.bind(model.config) == bound
