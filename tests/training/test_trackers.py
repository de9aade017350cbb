"""Tests of experiment trackers, diverged losses and the progress bar."""

import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from outpace.training import HeldOut, trackers
from outpace.training.checkpoint import list_checkpoints
from runs import metrics, trainer


def test_tensorboard_shows_what_the_log_has(tmp_path: Path) -> None:
    held = HeldOut(path="story:test", examples=2, every=2)
    run = trainer(tmp_path, steps=4, log_every=2, tracker="tensorboard", held_out=held)
    run.fit()
    run.close()
    events = EventAccumulator(str(tmp_path / trackers.PROJECT)).Reload()
    logged = [(line["step"], pytest.approx(line["loss"])) for line in metrics(tmp_path)]
    assert [(point.step, point.value) for point in events.Scalars("loss")] == logged
    assert [point.step for point in events.Scalars("held_out/loss")] == [0, 2, 4]


def test_a_tracker_changes_nothing(tmp_path: Path) -> None:
    trainer(tmp_path / "without", steps=3, log_every=1, save_every=1).fit()
    trainer(tmp_path / "with", steps=3, log_every=1, save_every=1).fit()
    shutil.rmtree(tmp_path / "with" / "checkpoints" / "step-00000003")
    trainer(tmp_path / "with", steps=3, log_every=1, save_every=1, tracker="tensorboard").fit()
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")


@pytest.mark.parametrize("where", ["weight", "loss"])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, where: str) -> None:
    trainer(tmp_path, steps=4, log_every=10, save_every=2).fit(2)
    run = trainer(tmp_path, steps=20, log_every=10, save_every=2)
    update = run.train_step

    def breaking(step: int, steps: int):
        if step == 5 and where == "weight":
            with torch.no_grad():
                run.model.embedding.weight.fill_(float("nan"))
        total, *rest = update(step, steps)
        return (total * float("nan") if step == 5 else total, *rest)

    run.train_step = breaking
    with pytest.raises(ValueError, match="nan"):
        run.fit()
    assert list_checkpoints(tmp_path / "checkpoints")[-1].name == "step-00000004"
    assert [line["step"] for line in metrics(tmp_path)] == [2]
