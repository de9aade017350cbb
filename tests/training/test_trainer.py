"""The loop: the loss falls, a killed run goes on, an export loads."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import published
from outpace.models.load import ZOO, load_model, load_tokenizer, translate
from outpace.models.transformer import Transformer
from outpace.training import checkpoint
from outpace.training.objectives import MDLM, SFT
from outpace.training.recipe import train
from outpace.training.trainer import Loop, Trainer

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = f"""
[model]
tokenizer = "{ZOO / "vocabulary"}"
config = {json.dumps(published(vocab_size=1024)).replace(": ", " = ")}
[objective]
name = "sft"
[data]
path = "story:train"
[optim]
optimizer = "muon"
lr = 1e-2
warmup = 2
decay = 0
[train]
steps = 12
batch = 4
log_every = 1
save_every = 4
"""


def trainer(out: Path, architecture: str = "Qwen2ForCausalLM", **options: object) -> Trainer:
    """A trainer of a tiny random model on the story."""
    mask = {} if architecture.startswith("Qwen") else {"mask_token_id": 1021}
    config = published(architecture, vocab_size=1024, **mask)
    objective = MDLM(suffix=0.3, anchored=0.3) if mask else SFT()
    defaults = {"optimizer": "muon", "lr": 1e-2, "warmup": 2, "batch": 4, "save_every": 4}
    return Trainer(
        checkpoint.fresh(config, 0),
        objective,
        data="story:train",
        out=out,
        tokenizer=ZOO / "vocabulary",
        **{**defaults, **options},
    )


def losses(out: Path) -> list[float]:
    """The losses that a run has logged."""
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "DreamModel"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_twenty_steps_lower_the_loss(tmp_path: Path, architecture: str, precision: str):
    trainer(tmp_path, architecture, log_every=2, precision=precision).fit(20)
    assert sum(losses(tmp_path)[-3:]) < 0.9 * sum(losses(tmp_path)[:3])


def test_going_on_from_a_checkpoint_reaches_the_same_weights(tmp_path: Path):
    trainer(tmp_path / "whole", steps=8, log_every=1).fit()
    trainer(tmp_path / "halves", steps=8, log_every=1).fit()
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-00000008")
    trainer(tmp_path / "halves", steps=8, log_every=1).fit()
    assert losses(tmp_path / "whole") == losses(tmp_path / "halves")
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        whole, halves = (
            load_file(tmp_path / run / "checkpoints" / "step-00000008" / name)
            for run in ("whole", "halves")
        )
        assert whole.keys() == halves.keys()
        assert all(torch.equal(whole[key], halves[key]) for key in whole)


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path):
    one = trainer(tmp_path / "one", steps=1)
    two = trainer(tmp_path / "two", steps=1, accumulation=2)
    for run in (one, two):
        run.fit()
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=2e-4) for a, b in pairs)


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path):
    trainer(tmp_path, steps=4).fit()
    with pytest.raises(ValueError, match=r"optim.lr 0.01 \(now 0.02\)"):
        trainer(tmp_path, steps=4, lr=2e-2)
    trainer(tmp_path, steps=5).fit()
    assert checkpoint.newest(tmp_path / "checkpoints").name == "step-00000005"


def test_an_export_loads_with_its_tokenizer(tmp_path: Path):
    run = trainer(tmp_path, "DreamModel", steps=1)
    run.export(tmp_path / "export")
    model = load_model(tmp_path / "export")
    assert model.config.mask_id == 1021 and model.config.bidirectional
    for ours, theirs in zip(model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.detach().bfloat16().float())
    assert load_tokenizer(tmp_path / "export").chat_template


def test_a_causal_checkpoint_is_adapted_to_a_diffusion_model(tmp_path: Path):
    run = trainer(tmp_path, steps=1)
    run.export(tmp_path / "export")
    changes = {"architectures": ["DreamModel"], "mask_token_id": 1021}
    model = checkpoint.adapted(str(tmp_path / "export"), changes)
    assert model.config.bidirectional and model.config.shift == 1
    assert torch.equal(model.embedding.weight, load_model(tmp_path / "export").embedding.weight)
    with pytest.raises(ValueError, match="other tensors"):
        checkpoint.adapted(str(tmp_path / "export"), {"intermediate_size": 16})


def test_without_the_shift_queries_look_from_the_slot_before():
    """Those of positions 1, 2, … are what those of 0, 1, … were; keys stay."""
    model = Transformer(translate({**published("DreamModel", mask_token_id=1)}))
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
            checkpoint.look_left(model)
    (q, *_), (turned, *_) = seen
    torch.testing.assert_close(turned, q)
    model.blocks[0].attention(x, model.cos[:9, None], model.sin[:9, None], attend)
    assert all(torch.equal(now, then) for now, then in zip(seen[2][1:], seen[0][1:], strict=True))


def test_a_format_that_spells_its_config_otherwise_takes_a_whole_one(tmp_path: Path):
    run = trainer(tmp_path, "DreamModel", steps=1)
    run.export(tmp_path / "export")
    table = tomllib.loads((RECIPES / "tiny-llada.toml").read_text())["model"]["config"]
    dream = run.model.config
    table |= {"vocab_size": dream.vocab, "embedding_size": dream.vocab, "d_model": dream.dim}
    table |= {"n_layers": dream.layers, "n_heads": dream.heads, "n_kv_heads": dream.kv_heads}
    table |= {"mlp_hidden_size": dream.mlp, "weight_tying": dream.tied}
    model = checkpoint.adapted(str(tmp_path / "export"), table)
    assert model.config.shift == 0 and model.config.source == table
    exported = load_model(tmp_path / "export")
    queries = exported.config.heads * exported.config.head_dim
    theirs = dict(exported.named_parameters())
    for name, ours in model.named_parameters():
        kept = slice(queries if ".qkv." in name else 0, None)
        assert torch.equal(ours[kept], theirs[name][kept])
    with pytest.raises(ValueError, match="block_type None is not supported"):
        checkpoint.adapted(str(tmp_path / "export"), {"architectures": ["LLaDAModelLM"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 3, "accumulation": 2}, "does not divide"),
        ({"rate": 1.0}, "unknown options rate; known are steps"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"precision": "fp8"}, "choose no or bf16"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, options: dict[str, object], message: str
):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options)


def test_a_model_in_memory_needs_a_tokenizer(tmp_path: Path):
    model = checkpoint.fresh(published(), 0)
    with pytest.raises(ValueError, match="needs tokenizer"):
        Trainer(model, SFT(), data="story:train", out=tmp_path, loop=Loop())


def start(path: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """Train a recipe in a process of its own."""
    command = [sys.executable, "-m", "outpace.training.recipe", str(path), f"out={out}", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def test_a_killed_run_goes_on_to_the_same_loss(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    killed = start(recipe, tmp_path / "killed", "steps=400")
    while checkpoint.newest(tmp_path / "killed" / "checkpoints") is None:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    done = int(checkpoint.newest(tmp_path / "killed" / "checkpoints").name.removeprefix("step-"))
    for out in ("killed", "whole"):
        train(recipe, [f"out={tmp_path / out}", f"steps={done + 3}"])
    assert len(losses(tmp_path / "whole")) == done + 3
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")


def test_two_processes_train_like_one(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    pair = start(recipe, tmp_path / "pair", "steps=3", "--processes", "2")
    train(recipe, [f"out={tmp_path / 'one'}", "steps=3"])
    assert pair.wait() == 0
    assert losses(tmp_path / "pair") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert json.loads((tmp_path / "pair" / "run.json").read_text())["processes"] == 2
    assert (tmp_path / "pair" / "export" / "model.safetensors").is_file()
