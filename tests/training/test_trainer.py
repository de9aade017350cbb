"""Tests of the training loop: falling loss, resuming, export."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outpace.checkpoints.load import load_model, load_tokenizer
from outpace.decoding import Kind
from outpace.training import Loop, checkpoint
from outpace.training.checkpoint import list_checkpoints
from outpace.training.recipe import train_recipe
from runs import RECIPE, losses, metrics, start, trainer


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "DreamModel"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_twenty_steps_lower_the_loss(tmp_path: Path, architecture: str, precision: str) -> None:
    trainer(tmp_path, architecture, log_every=2, precision=precision).fit(20)
    assert sum(losses(tmp_path)[-3:]) < 0.9 * sum(losses(tmp_path)[:3])


def test_going_on_from_a_checkpoint_reaches_the_same_weights(tmp_path: Path) -> None:
    trainer(tmp_path / "whole", steps=8, log_every=3).fit()
    trainer(tmp_path / "halves", steps=8, log_every=3).fit()
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-00000008")
    trainer(tmp_path / "halves", steps=8, log_every=3).fit()
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "halves")
    assert [line["step"] for line in metrics(tmp_path / "whole")] == [3, 6, 8]
    for name in (checkpoint.MODEL_FILE, checkpoint.OPTIMIZER_FILE):
        whole, halves = (
            load_file(tmp_path / run / "checkpoints" / "step-00000008" / name)
            for run in ("whole", "halves")
        )
        assert whole.keys() == halves.keys()
        assert all(torch.equal(whole[key], halves[key]) for key in whole)


def test_epochs_are_steps(tmp_path: Path) -> None:
    assert Loop(batch=4, epochs=2.5).with_epochs(10).steps == 7
    assert Loop(steps=9, batch=4).with_epochs(None).steps == 9
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "?", "response": "! " * n}) + "\n" for n in (3, 4))
    )
    trainer(tmp_path / "run", data=str(path), batch=2, epochs=3, log_every=1).fit()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    with pytest.raises(ValueError, match="epochs"):
        trainer(tmp_path / "story", epochs=1)
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="epochs"):
            Loop(epochs=wrong)


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    one = trainer(tmp_path / "one", steps=1)
    two = trainer(tmp_path / "two", steps=1, accumulation=2)
    for run in (one, two):
        run.fit()
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)
    pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=2e-4) for a, b in pairs)


def test_an_export_loads_with_its_tokenizer(tmp_path: Path) -> None:
    run = trainer(tmp_path, "DreamModel", steps=1)
    run.export(tmp_path / "export")
    model = load_model(tmp_path / "export")
    assert model.config.mask_id == 1021 and model.config.kind is Kind.DIFFUSION
    for ours, theirs in zip(model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours, theirs.detach().bfloat16().float())
    assert load_tokenizer(tmp_path / "export").chat_template


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 3, "accumulation": 2}, "is not divisible"),
        ({"rate": 1.0}, "unknown options rate; allowed are steps"),
        ({"steps": 0}, "steps must be a whole number from 1"),
        ({"precision": "fp8"}, "choose no or bf16"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options)


@pytest.mark.nightly
def test_a_killed_run_goes_on_to_the_same_metrics(tmp_path: Path) -> None:
    recipe, options = tmp_path / "recipe.toml", ["log_every=3", "save_every=4"]
    recipe.write_text(RECIPE)
    killed = start(recipe, tmp_path / "killed", "steps=400", *options)
    while not list_checkpoints(tmp_path / "killed" / "checkpoints"):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    done = int(list_checkpoints(tmp_path / "killed" / "checkpoints")[-1].name.removeprefix("step-"))
    for out in ("killed", "whole"):
        train_recipe(recipe, [f"out={tmp_path / out}", f"steps={done + 3}", *options])
    assert [line["step"] for line in metrics(tmp_path / "whole")][-1] == done + 3
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")


@pytest.mark.nightly
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    recipe, options = tmp_path / "recipe.toml", ["steps=3", "clip=0"]
    recipe.write_text(RECIPE)
    for name, processes in (("pair", 2), ("one", 1)):
        train_recipe(recipe, [f"out={tmp_path / name}", *options], processes)
    assert losses(tmp_path / "pair") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert json.loads((tmp_path / "pair" / "run.json").read_text())["processes"] == 2
    assert (tmp_path / "pair" / "export" / "model.safetensors").is_file()
    pair, one = (moments(tmp_path / name) for name in ("pair", "one"))
    assert pair == pytest.approx(one, rel=0.05) and min(one.values()) > 0


def moments(out: Path) -> dict[str, float]:
    """Sizes of the first moments of the optimizers of a run."""
    tensors = load_file(list_checkpoints(out / "checkpoints")[-1] / checkpoint.OPTIMIZER_FILE)
    kept = ("exp_avg", "momentum_buffer")
    return {name: float(t.norm()) for name, t in tensors.items() if name.endswith(kept)}


def interrupted_run(tmp_path: Path, number: signal.Signals, *more: str) -> tuple[int, str]:
    """Status and output of a training that gets a signal after its third step."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ("train", str(tmp_path / "recipe.toml"), f"out={tmp_path / 'out'}", *more)
    process = subprocess.Popen(
        [sys.executable, "-m", "outpace", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    path = tmp_path / "out" / "metrics.jsonl"
    while not (path.exists() and len(path.read_text().splitlines()) >= 3):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


@pytest.mark.parametrize(
    ("number", "last", "more"),
    [
        pytest.param(signal.SIGINT, "interrupted", (), marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, "terminated", ("--processes", "2"), marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, "terminated", (), marks=pytest.mark.nightly),
        pytest.param(
            *(signal.SIGINT, "interrupted", ("--processes", "2")), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_signal_ends_a_run_after_a_checkpoint(
    tmp_path: Path, number: signal.Signals, last: str, more: tuple[str, ...]
) -> None:
    status, printed = interrupted_run(tmp_path, number, "steps=5000", "save_every=5000", *more)
    assert status == 128 + number and printed.endswith(f"outpace: {last}\n")
    assert "Traceback" not in printed
    (kept,) = list_checkpoints(tmp_path / "out" / "checkpoints")
    step = int(kept.name.removeprefix("step-"))
    assert f"stopped after step {step}; the same command resumes from" in printed
    assert len(metrics(tmp_path / "out")) == step >= 3
    train_recipe(
        tmp_path / "recipe.toml", [f"out={tmp_path / 'out'}", f"steps={step + 1}", "save_every=1"]
    )
    assert len(metrics(tmp_path / "out")) == step + 1
