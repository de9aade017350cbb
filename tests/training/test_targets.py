"""Targets in 4 and 8 bits train drafts as dequantized ones do, and a draft's own vocabulary."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import needs_packed_loops, published_eagle
from outpace.checkpoints.load import load_draft, load_model
from outpace.models.int8 import has_int8_products, is_quantized
from outpace.training.recipe import Recipe, load_recipe
from outpace.training.weights import load_target
from runs import losses, write_lines
from sharded import DRAFT

SIZES = {"hidden_size": 128, "vocab_size": 1024}
DFLASH: dict[str, Any] = {**DRAFT, **SIZES, "num_target_layers": 4}
EAGLE = published_eagle(**SIZES, draft_vocab_size=300) | {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
}
OWN_HEAD: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "block_size": 6,
    "draft_vocab_size": 300,
    "mask_token_id": 1021,
    "aux_hidden_state_layer_ids": [1, 3],
    "transformer_layer_config": {
        name: value
        for name, value in DFLASH.items()
        if name not in ("architectures", "block_size", "dflash_config", "num_target_layers")
    },
}
BORROWED: dict[str, Any] = {**OWN_HEAD, "target_head": True}
DRAFTS = {"dflash": DFLASH, "own head": OWN_HEAD, "target's head": BORROWED, "eagle": EAGLE}

needs_int8 = pytest.mark.skipif(not has_int8_products(), reason="this machine has no int8 products")


def recipe(folder: Path, name: str, out: str, **changes: Any) -> Recipe:
    data = folder / "data.jsonl"
    if not data.exists():
        texts = {f"{n}?": f"{n} and {n + 1} are {2 * n + 1}. " * 3 for n in range(40)}
        write_lines(data, *({"prompt": p, "response": r} for p, r in texts.items()))
    config = json.dumps(DRAFTS[name]).replace('": ', '" = ')
    objective = "eagle3" if name == "eagle" else "dflash"
    path = folder / "recipe.toml"
    path.write_text(
        f'[model]\ntarget = "tiny-aux"\nconfig = {config}\n[objective]\nname = "{objective}"\n'
        f'[data]\npath = "{data}"\n[train]\nsteps = 4\nbatch = 4\nlog_every = 1\nsave_every = 2\n'
    )
    overrides = [f"{key}={value}" for key, value in {"train.seed": 0, **changes}.items()]
    return load_recipe(path, [f"out={folder / out}", *overrides])


def train(folder: Path, name: str, out: str, steps: int = 4, **changes: Any) -> list[float]:
    trainer = recipe(folder, name, out, **changes).build_trainer()
    trainer.fit(steps)
    trainer.export(folder / out / "export")
    trainer.close()
    return losses(folder / out)


@pytest.mark.sampled
@needs_packed_loops
@needs_int8
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", DRAFTS)
def test_losses_are_those_of_the_dequantized_target(
    name: str, quantize: str, tmp_path: Path
) -> None:
    target = load_target("tiny-aux", torch.float32, quantize)
    assert is_quantized(target)
    plain = load_model("tiny-aux")
    plain.load_state_dict(target.state_dict())
    whole = train(tmp_path, name, "whole", **{"model.quantize": quantize})
    trainer = recipe(tmp_path, name, "plain", **{"model.quantize": "none"}).build_trainer()
    (own,) = trainer.loss_module.models.others.values()
    own.load_state_dict(plain.state_dict())
    trainer.fit(2)
    trainer.close()
    assert losses(tmp_path / "plain") == pytest.approx(whole[:2], rel=1e-2)
    first = train(tmp_path, name, "broken", 2, **{"model.quantize": quantize})
    again = train(tmp_path, name, "broken", **{"model.quantize": quantize})
    assert first == whole[:2] and again == whole


@pytest.mark.parametrize("name", ["own head", "target's head", "eagle"])
def test_a_new_draft_covers_the_most_frequent_tokens(name: str, tmp_path: Path) -> None:
    settings = recipe(tmp_path, name, "out")
    trainer = settings.build_trainer()
    draft, examples = trainer.model, trainer.examples
    trainer.close()
    tokens = draft.head_tokens
    assert tokens is not None and len(tokens) == 300
    counts = Counter(token for n in range(40) for token in examples[n].response)
    assert set(counts) <= set(tokens.tolist()) and draft.t2d.sum() == 300
    rows = load_model("tiny-aux").embedding.weight[tokens]
    assert torch.equal(draft.unembedding.weight, rows)
    write_lines(tmp_path / "data.jsonl", {"prompt": "?", "response": "Other."})
    again = settings.build_trainer()
    assert torch.equal(again.model.head_tokens, tokens)
    again.close()
    trained = train(tmp_path, name, "out", 2)
    loaded = load_draft(tmp_path / "out" / "export", load_model("tiny-aux"))
    assert torch.equal(loaded.head_tokens, tokens) and all(0 < loss < 20 for loss in trained)
    assert torch.equal(loaded.unembedding.weight, rows) == (name == "target's head")
    assert (loaded.config.target_fingerprint is None) == (name != "target's head")


@pytest.mark.parametrize("name", ["own head", "target's head"])
def test_a_draft_trained_further_keeps_its_rows(name: str, tmp_path: Path) -> None:
    train(tmp_path, "own head", "first", 2)
    target = load_model("tiny-aux")
    init = load_draft(tmp_path / "first" / "export", target)
    write_lines(tmp_path / "data.jsonl", {"prompt": "?", "response": "Other."})
    changes = {"model.init": f"{tmp_path}/first/export", "train.batch": 1}
    trainer = recipe(tmp_path, name, "again", **changes).build_trainer()
    draft, response = trainer.model, trainer.examples[0].response
    trainer.close()
    assert {*response} - {*init.head_tokens.tolist()}  # the answer has tokens that are new
    assert {*response} <= {*draft.head_tokens.tolist()}
    places = init.head_labels(draft.head_tokens)
    assert (places >= 0).sum() >= 300 - len({*response})
    kept = init.unembedding if name == "own head" else target.embedding
    chosen = places if name == "own head" else draft.head_tokens
    known = places >= 0
    assert torch.equal(draft.unembedding.weight[known], kept.weight[chosen[known]])
    assert torch.equal(draft.fusion.weight, init.fusion.weight)


def test_a_token_that_the_head_does_not_cover_has_no_loss(tmp_path: Path) -> None:
    for dpace in ("false", "true"):
        out = f"dpace-{dpace}"
        changes = {"dpace": dpace, "model.config.draft_vocab_size": 4, "train.batch": 2}
        settings = recipe(tmp_path, "own head", out, **changes)
        trainer = settings.build_trainer()
        rows, _ = trainer.build_batches(0)
        loss, metrics = trainer.loss_module(rows[0])
        covered = trainer.model.t2d[rows[0].labels.clamp(min=0)] & (rows[0].labels >= 0)
        assert 0 < covered.sum() < (rows[0].labels >= 0).sum()
        assert metrics["accuracy"][1] == (rows[0].labels >= 0).sum()
        assert metrics["accuracy"][0] <= covered.sum() and torch.isfinite(loss)
        trainer.close()


def test_a_damaged_table_of_tokens_is_rejected(tmp_path: Path) -> None:
    settings = recipe(tmp_path, "eagle", "out")
    settings.build_trainer().close()
    path = tmp_path / "out" / "draft_tokens.json"
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="draft_tokens"):
        settings.build_trainer()
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="draft_vocab_size"):
        settings.build_trainer()
