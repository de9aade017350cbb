"""Tests of validation on held-out examples, which must not change the training."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outpace.training import HeldOut, Trainer
from outpace.training.checkpoint import MODEL_FILE, list_checkpoints
from outpace.training.lora import LoRA
from outpace.training.objectives import D2F, SFT
from runs import metrics, trainer

PLAIN = {"name": "autoregressive"}
HELD = {"path": "story:test", "every": 2, "examples": 6}


def looks(out: Path) -> list[dict[str, float]]:
    """The lines of validation metrics."""
    return [json.loads(line) for line in (out / "held_out.jsonl").read_text().splitlines()]


def adapted(out: Path, held_out: HeldOut | None) -> Trainer:
    """A trainer of an adapter with dropout, which draws from PyTorch's generator."""
    torch.manual_seed(5)
    return Trainer(
        "tiny-dream",
        D2F(canvas=(40, 48)),
        data="story:train",
        out=out,
        adapter=LoRA(rank=2, dropout=0.5),
        held_out=held_out,
        steps=4,
        batch=2,
        log_every=1,
        lr=1e-2,
        warmup=0,
    )


def test_a_look_leaves_the_training_as_it_was(tmp_path: Path) -> None:
    held = HeldOut(**HELD, decode=2, max_tokens=16)
    adapted(tmp_path / "without", None).fit()
    adapted(tmp_path / "with", held).fit()
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")
    ours, theirs = (
        load_file(list_checkpoints(tmp_path / name / "checkpoints")[-1] / MODEL_FILE)
        for name in ("with", "without")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    found = looks(tmp_path / "with")
    assert [line["step"] for line in found] == [0, 2, 4]
    assert all(line["tokens_per_forward"] > 0 for line in found)
    assert found[0]["loss"] != found[1]["loss"]
    assert not (tmp_path / "with" / ".decode").exists()


def test_what_is_looked_at_is_the_same_each_time(tmp_path: Path) -> None:
    def held(out: Path) -> Trainer:
        return trainer(out, "DreamModel", steps=6, save_every=3, held_out=HeldOut(**HELD))

    held(tmp_path / "whole").fit()
    held(tmp_path / "halves").fit()
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-00000006")
    with (tmp_path / "halves" / "held_out.jsonl").open("a") as file:
        file.write('{"step":')
    held(tmp_path / "halves").fit()
    assert looks(tmp_path / "whole") == looks(tmp_path / "halves")
    assert [line["step"] for line in looks(tmp_path / "whole")] == [0, 2, 4, 6]


def test_a_good_model_is_found_to_be_one(tmp_path: Path) -> None:
    held = HeldOut(**{**HELD, "examples": 4}, decode=4, judge="number", method=PLAIN)
    run = Trainer(
        "tiny-ar", SFT(), data="story:train", out=tmp_path, held_out=held, steps=1, batch=1, lr=1e-9
    )
    run.fit()
    first, last = looks(tmp_path)
    assert first["answers_right"] == last["answers_right"] == 1.0
    assert 0.9 < first["tokens_per_forward"] < 1 and first["accuracy"] > 0.7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be a whole number from 1"),
        ({"decode": 7}, "decode must be at most examples \\(6\\), got 7"),
        ({"decode": 1, "max_tokens": 10**6}, "max_tokens 1000000 after a prompt of"),
        ({"path": "story:train"}, "held_out path 'story:train' is trained on"),
        ({"path": "table:train"}, "not for evaluation; use table:test"),
        ({"path": "absent.jsonl"}, "no data at 'absent.jsonl'"),
        ({"method": {"tokens": 2}}, "method needs a name in addition to tokens"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, held_out=HeldOut(**{**HELD, **options}))
    assert not (tmp_path / "checkpoints").exists()


def test_the_best_export_is_kept(tmp_path: Path) -> None:
    def fit(name: str, lr: float, best: str) -> tuple[Path, list[float]]:
        out, held = tmp_path / name, HeldOut(**HELD, best=best)
        run = trainer(out, steps=4, held_out=held, lr=lr, warmup=0)
        run.export(tmp_path / f"{name}-first")
        run.fit()
        run.export(out / "export")
        return out, [line["loss"] for line in looks(out)]

    falling, losses = fit("falling", 1e-2, "loss")
    assert losses == sorted(losses, reverse=True)
    files = [falling / each / "model.safetensors" for each in ("best", "export")]
    assert files[0].read_bytes() == files[1].read_bytes()
    rising, losses = fit("rising", 50.0, "loss")
    assert losses[0] == min(losses)
    first = tmp_path / "rising-first" / "model.safetensors"
    assert (rising / "best" / "model.safetensors").read_bytes() == first.read_bytes()
    with pytest.raises(ValueError, match="^best .*speed"):
        fit("unknown", 1e-2, "speed")
