"""Tests of initial weights: another family's checkpoint, and one without a shift."""

import tomllib
from pathlib import Path

import pytest
import torch

from helpers import published
from outpace import recipes
from outpace.checkpoints.load import load_model, translate_config
from outpace.decoding import Kind
from outpace.models.transformer import Transformer
from outpace.training import weights
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
