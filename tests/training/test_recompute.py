"""Tests of gradient checkpointing, and of frozen weights in bfloat16."""

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


def test_recomputing_keeps_dropout_and_teacher(tmp_path: Path) -> None:
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


FROZEN = {
    "--draft": '[model]\ntarget = "tiny-ar"\ninit = "tiny-dflash"\n[objective]\nname = "dflash"\n',
    "--adapter": '[model]\ninit = "tiny-dream"\n[adapter]\nrank = 2\n[objective]\nname = "d2f"\n',
}
COMMON = """
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
@pytest.mark.parametrize("flag", FROZEN)
def test_frozen_weights_may_be_in_bfloat16(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(FROZEN[flag] + COMMON)
    words = [f"out={tmp_path / 'half'}", "dtype=bfloat16"]
    half = load_recipe(recipe, words).build_trainer()
    assert {p.dtype for p in half.model.parameters() if p.requires_grad} == {torch.float32}
    (other,) = half.loss_module.models.others.values()
    assert torch.bfloat16 in {p.dtype for p in other.parameters()}
    train_recipe(recipe, words)
    train_recipe(recipe, [f"out={tmp_path / 'full'}"])
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "full"), rel=0.05)
    lines = (tmp_path / "half" / "held_out.jsonl").read_text().splitlines()
    assert all(json.loads(line)["tokens_per_forward"] > 0 for line in lines) and len(lines) == 2
    assert flag in capsys.readouterr().out
