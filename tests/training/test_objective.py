"""Logits of a large vocabulary are made a few rows at a time, and the loss stays what it was."""

from dataclasses import dataclass

import pytest
import torch
from numpy.random import default_rng

from helpers import MASK, published
from outpace.training import objective, weights
from outpace.training.data import Example
from outpace.training.objective import Models, Objective, build_teachers
from outpace.training.objectives import D2F, MDLM, SFT, WeDLM
from outpace.training.plan import MemoryTracker
from outpace.training.rows import pack_documents

VOCAB = 6000
CASES = {
    "sft": ("Qwen2ForCausalLM", SFT()),
    "wedlm": ("WeDLMForCausalLM", WeDLM()),
    "mdlm": ("DreamModel", MDLM()),
    "d2f": ("DreamModel", D2F(block=8, hard=0.3)),
}


@dataclass
class Seen:
    """What a loss came to."""

    loss: float
    hits: float
    gradient: torch.Tensor
    bytes: int


def seen(architecture: str, wanted: Objective) -> Seen:
    """One backward pass over three texts."""
    changes = {} if architecture.startswith("Qwen") else {"mask_token_id": MASK}
    model = weights.random_model(published(architecture, vocab_size=VOCAB, **changes), 0)
    bound = wanted.bind(model.config)
    texts = [Example([3, 4], [5 + n] * 60, [False] * 60) for n in range(3)]
    rows = pack_documents([bound.rows(text, default_rng(n)) for n, text in enumerate(texts)])
    models = Models(model, build_teachers(bound, model, adapted=False))
    with MemoryTracker() as memory:
        loss = bound.loss(models, rows)
        loss.total.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    hits = float(loss.metrics["accuracy"][0])
    return Seen(float(loss.total.detach()), hits, gradient, memory.peak.total())


@pytest.mark.parametrize("name", CASES)
def test_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = seen(*CASES[name])
    monkeypatch.setattr(objective, "ENTRIES", 7 * VOCAB)
    cut = seen(*CASES[name])
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6) and cut.hits == whole.hits
    assert torch.allclose(cut.gradient, whole.gradient, atol=1e-6, rtol=1e-4)
    assert cut.bytes < 0.8 * whole.bytes
