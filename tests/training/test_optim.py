"""Which optimizer updates what, and how fast."""

import pytest
from torch.optim import AdamW, Muon

from helpers import published
from outpace.checkpoints.load import translate_config
from outpace.models.transformer import Transformer
from outpace.training.optim import Optim

SHAPES = ("linear", "cosine")


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    optim = Optim(lr=1.0, warmup=4, decay=0.5)
    rates = [round(optim.learning_rate(step, 20), 3) for step in range(20)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert rates[5:10] == [1.0] * 5
    assert rates[-1] == pytest.approx(1 / 11, abs=1e-3)
    assert sorted(rates[10:], reverse=True) == rates[10:]


def test_muon_takes_the_matrices_of_the_blocks_only() -> None:
    model = Transformer(translate_config(published()))
    adamw, muon = Optim(optimizer="muon").build_optimizers(model)
    assert isinstance(adamw, AdamW) and isinstance(muon, Muon)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert own == {
        n for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2
    }
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert rest | own == set(names.values())


def test_a_cosine_falls_as_far_as_it_is_told() -> None:
    optim = Optim(lr=1.0, warmup=0, decay=1.0, schedule="cosine", least=0.1)
    rates = [optim.learning_rate(step, 1000) for step in range(1000)]
    assert sorted(rates, reverse=True) == rates
    assert rates[0] == pytest.approx(1.0, abs=1e-4)
    assert rates[500] == pytest.approx(0.55, abs=2e-3)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4) and min(rates) >= 0.1
    assert rates[0] - rates[10] < 1e-3 < rates[500] - rates[510]
    assert {
        Optim(lr=1.0, warmup=0, decay=0, schedule=name).learning_rate(7, 9) for name in SHAPES
    } == {1.0}
