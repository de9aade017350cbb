"""Tests of initial weights of another family, and of optimizers and their rates."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Muon

from helpers import published
from outpace import recipes
from outpace.checkpoints.checkpoint import translate_config
from outpace.checkpoints.load import load_model
from outpace.decoding import Kind
from outpace.models.transformer import Transformer
from outpace.training import weights
from outpace.training.optim import Optim, WideMuon
from runs import trainer


def test_a_causal_checkpoint_is_adapted_to_a_diffusion_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=1)
    run.export(tmp_path / "export")
    changes = {"architectures": ["DreamModel"], "mask_token_id": 1021}
    model = weights.adapt_checkpoint(str(tmp_path / "export"), changes)
    assert model.config.kind is Kind.DIFFUSION and model.config.shift == 1
    assert torch.equal(model.embedding.weight, load_model(tmp_path / "export").embedding.weight)
    with pytest.raises(ValueError, match="intermediate_size"):
        weights.adapt_checkpoint(str(tmp_path / "export"), {"intermediate_size": 16})


def test_without_the_shift_queries_look_from_the_slot_before() -> None:
    model = Transformer(translate_config({**published("DreamModel", mask_token_id=1)}))
    for parameter in model.blocks[0].attention.qkv.parameters():
        torch.nn.init.normal_(parameter)
    x, seen = torch.randn(9, model.config.dim), []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((q, k, v))
        return q

    for first in (0, 1):
        tables = (table[first : first + 9, None] for table in (model.cos, model.sin))
        model.blocks[0].attention(x, *tables, attend)
        if not first:
            weights.shift_queries(model)
    (q, *_), (turned, *_) = seen
    torch.testing.assert_close(turned, q)
    model.blocks[0].attention(x, model.cos[:9, None], model.sin[:9, None], attend)
    assert all(torch.equal(now, then) for now, then in zip(seen[2][1:], seen[0][1:], strict=True))


def test_a_format_that_spells_its_config_otherwise_takes_a_whole_one(tmp_path: Path) -> None:
    run = trainer(tmp_path, "DreamModel", steps=1)
    run.export(tmp_path / "export")
    table = tomllib.loads((recipes.RECIPES_FOLDER / "tiny-llada.toml").read_text())["model"][
        "config"
    ]
    dream = run.model.config
    table |= {"vocab_size": dream.vocab, "embedding_size": dream.vocab, "d_model": dream.dim}
    table |= {"n_layers": dream.layers, "n_heads": dream.heads, "n_kv_heads": dream.kv_heads}
    table |= {"mlp_hidden_size": dream.mlp, "weight_tying": dream.tied}
    model = weights.adapt_checkpoint(str(tmp_path / "export"), table)
    assert model.config.shift == 0 and model.config.source == table
    exported = load_model(tmp_path / "export")
    queries = exported.config.heads * exported.config.head_dim
    theirs = dict(exported.named_parameters())
    for name, ours in model.named_parameters():
        kept = slice(queries if ".qkv." in name else 0, None)
        assert torch.equal(ours[kept], theirs[name][kept])
    with pytest.raises(ValueError, match="activation_type"):
        weights.adapt_checkpoint(str(tmp_path / "export"), {"architectures": ["LLaDAModelLM"]})


def test_rate_rises_stays_and_falls() -> None:
    optim = Optim(lr=1.0, warmup=4, decay=0.5)
    rates = [round(optim.learning_rate(step, 20), 3) for step in range(20)]
    assert rates[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert rates[5:10] == [1.0] * 5
    assert rates[-1] == pytest.approx(1 / 11, abs=1e-3)
    assert sorted(rates[10:], reverse=True) == rates[10:]


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_muon_equals_that_of_pytorch_up_to_rounding(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.training.optim.computes_bfloat16", lambda device: False)
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    both = [torch.nn.Parameter(torch.ones(shape)) for _ in range(2)]
    ours, theirs = WideMuon(both[:1], **settings), Muon(both[1:], **settings)
    for _ in range(3):
        gradient = torch.randn(shape)
        for parameter, optimizer in zip(both, (ours, theirs), strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(parameter.grad, gradient)
    torch.testing.assert_close(*both, atol=4e-3, rtol=0)
    assert not torch.allclose(both[0], torch.ones(shape), atol=0.1)


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


def test_cosine_falls_to_its_least() -> None:
    optim = Optim(lr=1.0, warmup=0, decay=1.0, schedule="cosine", least=0.1)
    rates = [optim.learning_rate(step, 1000) for step in range(1000)]
    assert sorted(rates, reverse=True) == rates
    assert rates[0] == pytest.approx(1.0, abs=1e-4)
    assert rates[500] == pytest.approx(0.55, abs=2e-3)
    assert rates[-1] == pytest.approx(0.1, abs=1e-4) and min(rates) >= 0.1
    assert rates[0] - rates[10] < 1e-3 < rates[500] - rates[510]
    for name in ("linear", "cosine"):
        assert Optim(lr=1.0, warmup=0, decay=0, schedule=name).learning_rate(7, 9) == 1.0
