"""Tests of gradient checkpointing, and of frozen weights in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outpace.training import Trainer
from outpace.training.lora import LoRA
from outpace.training.objectives import D2F
from outpace.training.recipe import load_recipe, train_recipe
from runs import losses, metrics, trainer


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "DreamModel"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_recomputing_changes_no_loss(tmp_path: Path, architecture: str, precision: str) -> None:
    options = {"steps": 4, "log_every": 1, "precision": precision}
    trainer(tmp_path / "kept", architecture, **options).fit()
    trainer(tmp_path / "again", architecture, **options, recompute=True).fit()
    assert metrics(tmp_path / "kept") == metrics(tmp_path / "again")


def test_nor_do_dropout_and_a_teacher(tmp_path: Path) -> None:
    for name, again in (("kept", False), ("again", True)):
        torch.manual_seed(5)
        Trainer(
            "tiny-dream",
            D2F(canvas=(40, 48)),
            data="story:train",
            out=tmp_path / name,
            adapter=LoRA(rank=2, dropout=0.5),
            steps=3,
            batch=2,
            log_every=1,
            lr=1e-2,
            warmup=0,
            recompute=again,
        ).fit()
    assert metrics(tmp_path / "kept") == metrics(tmp_path / "again")
    assert len(set(losses(tmp_path / "kept"))) == 3


DRAFT = """
[model]
target = "tiny-ar"
dtype = "bfloat16"
init = "tiny-dflash"
[objective]
name = "dflash"
anchors = 4
[data]
path = "story:train"
[train]
steps = 2
batch = 2
log_every = 1
precision = "bf16"
recompute = true
[held_out]
path = "story:test"
examples = 2
decode = 1
max_tokens = 8
"""
ADAPTER = """
[model]
init = "tiny-dream"
dtype = "bfloat16"
[adapter]
rank = 2
[objective]
name = "d2f"
[data]
path = "story:train"
[train]
steps = 2
batch = 2
log_every = 1
precision = "bf16"
recompute = true
[held_out]
path = "story:test"
examples = 2
decode = 1
max_tokens = 16
"""


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("text", [DRAFT, ADAPTER], ids=["draft", "adapter"])
def test_what_looks_on_may_be_in_bfloat16(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(text)
    half = load_recipe(recipe, [f"out={tmp_path / 'half'}"]).build_trainer()
    numbers = {p.dtype for p in half.model.parameters() if p.requires_grad}
    assert numbers == {torch.float32}
    looking = half.loss_module.models.others
    assert {p.dtype for model in looking.values() for p in model.parameters()} >= {torch.bfloat16}
    for name in ("half", "full"):
        train_recipe(
            recipe, [f"out={tmp_path / name}", *(["dtype=float32"] if name == "full" else [])]
        )
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "full"), rel=0.05)
    lines = (tmp_path / "half" / "held_out.jsonl").read_text().splitlines()
    assert all(json.loads(line)["tokens_per_forward"] > 0 for line in lines) and len(lines) == 2
    said = capsys.readouterr().out
    assert ("--draft" if text is DRAFT else "--adapter") in said
