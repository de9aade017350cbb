"""Tests of validation on held-out examples, which must not change the training."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outpace.training import HeldOut, Trainer
from outpace.training.checkpoint import MODEL_FILE, list_checkpoints
from outpace.training.lora import LoRA, collect_updates
from outpace.training.objectives import SFT
from outpace.training.report import TrainingReport
from runs import adapter_trainer, metrics, same_tensors, trainer

PLAIN = {"name": "autoregressive"}
HELD = {"path": "story:test", "every": 2, "examples": 6}


def validations(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]


def test_validation_changes_no_training(tmp_path: Path) -> None:
    held = HeldOut(**HELD, decode=2, max_tokens=16)
    adapter_trainer(tmp_path / "without", steps=4).fit()
    adapter_trainer(tmp_path / "with", steps=4, held_out=held).fit()
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")
    ours, theirs = (
        load_file(list_checkpoints(tmp_path / name / "checkpoints")[-1] / MODEL_FILE)
        for name in ("with", "without")
    )
    assert same_tensors(ours, theirs)
    found = validations(tmp_path / "with")
    assert [line["step"] for line in found] == [0, 2, 4]
    assert all(line["tokens_per_forward"] > 0 for line in found)
    assert 0 < found[0]["divergence"] < 1  # the teacher's own entropy is above 1
    assert found[0]["divergence"] != found[1]["divergence"] and "loss" not in found[0]
    assert not (tmp_path / "with" / ".decode").exists()


def test_validation_has_no_dropout(tmp_path: Path) -> None:
    found = []
    for dropout in (0.0, 0.5):
        adapter, out = LoRA(rank=2, dropout=dropout), tmp_path / str(dropout)
        run = adapter_trainer(out, adapter=adapter, steps=1, held_out=HeldOut(**HELD))
        for update in collect_updates(run.model).values():
            torch.nn.init.ones_(update.up)
        run.fit()
        found.append(validations(out)[0])
    assert found[0] == found[1]


def test_validated_examples_are_the_same_after_resuming(tmp_path: Path) -> None:
    def held(out: Path) -> Trainer:
        return trainer(out, "DreamModel", steps=6, save_every=3, held_out=HeldOut(**HELD))

    held(tmp_path / "whole").fit()
    held(tmp_path / "halves").fit()
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-00000006")
    with (tmp_path / "halves" / "held_out.jsonl").open("a") as file:
        file.write('{"step":')
    held(tmp_path / "halves").fit()
    assert validations(tmp_path / "whole") == validations(tmp_path / "halves")
    assert [line["step"] for line in validations(tmp_path / "whole")] == [0, 2, 4, 6]


def test_good_model_has_good_figures(tmp_path: Path) -> None:
    held = HeldOut(**{**HELD, "examples": 4}, decode=4, judge="number", method=PLAIN)
    run = Trainer(
        "tiny-ar", SFT(), data="story:train", out=tmp_path, held_out=held, steps=1, batch=1, lr=1e-9
    )
    run.fit()
    first, last = validations(tmp_path)
    assert first["answers_right"] == last["answers_right"] == 1.0
    assert 0.9 < first["tokens_per_forward"] < 1 and first["accuracy"] > 0.7


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"every": 0}, "every"),
        ({"decode": 7}, "decode"),
        ({"decode": 1, "max_tokens": 10**6}, "max_tokens"),
        ({"path": "story:train"}, "story:train"),
        ({"path": "table:train"}, "table:test"),
        ({"path": "absent.jsonl"}, "absent.jsonl"),
        ({"method": {"tokens": 2}}, "method"),
    ],
)
def test_invalid_validation_is_refused(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        trainer(tmp_path, held_out=HeldOut(**{**HELD, **options}))
    assert not (tmp_path / "checkpoints").exists()


def test_the_best_export_is_kept(tmp_path: Path) -> None:
    def fit(name: str, lr: float) -> tuple[Path, list[float]]:
        out, held = tmp_path / name, HeldOut(**HELD, best="loss")
        run = trainer(out, steps=4, held_out=held, lr=lr, warmup=0)
        run.export(tmp_path / f"{name}-first")
        run.fit()
        run.export(out / "export")
        return out, [line["loss"] for line in validations(out)]

    falling, losses = fit("falling", 1e-2)
    assert losses == sorted(losses, reverse=True)
    files = [falling / each / "model.safetensors" for each in ("best", "export")]
    assert files[0].read_bytes() == files[1].read_bytes()
    rising, losses = fit("rising", 50.0)
    assert losses[0] == min(losses)
    first = tmp_path / "rising-first" / "model.safetensors"
    assert (rising / "best" / "model.safetensors").read_bytes() == first.read_bytes()
    lines = [{"divergence": 0.3, "accuracy": 0.3}, {"divergence": 0.2, "accuracy": 0.2}]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, lines)))
    ends: Any = SimpleNamespace(out=tmp_path)
    assert [TrainingReport.is_best(ends, name) for name in lines[0]] == [True, False]
    with pytest.raises(ValueError, match="best"):
        trainer(tmp_path / "speed", steps=4, held_out=HeldOut(**HELD, best="speed")).fit()
