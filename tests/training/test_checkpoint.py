"""Tests of checkpoints: damage, locking of a run folder, and full disks."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.training import checkpoint
from outpace.training.checkpoint import MODEL_FILE, OPTIMIZER_FILE, STATE_FILE
from outpace.training.trackers import LOCK_FILE, lock_folder
from runs import losses, metrics, same_tensors, trainer

LATER, EARLIER = "step-00000002", "step-00000001"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with both of its checkpoints."""
    out = tmp_path_factory.mktemp("whole")
    trainer(out, **EACH).fit()
    return out


EACH = {"steps": 2, "save_every": 1, "log_every": 1}


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def clear(path: Path) -> None:
    """Leave a valid file without tensors."""
    save_file({}, path)


def rename(path: Path) -> None:
    """Make a checkpoint look like one of another step."""
    path.rename(path.with_name("step-zzz"))


def change(name: str, edit: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: edit(path / name)


def write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *[
            (change(name, edit), name)
            for name in (MODEL_FILE, OPTIMIZER_FILE)
            for edit in (cut, flip, clear, Path.unlink, write(""), write("x" * 99))
        ],
        *[
            (change(STATE_FILE, edit), STATE_FILE)
            for edit in (cut, Path.unlink, *map(write, ("", "{}", "[]", "5", '{"step": 2}')))
        ],
        (change(STATE_FILE, lambda path: (path.unlink(), path.mkdir())), STATE_FILE),
        (lambda path: (shutil.rmtree(path), path.mkdir()), STATE_FILE),
        (rename, "step 2"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    run: Path,
    whole: Path,
    damage: Callable[[Path], object],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(run / "checkpoints" / LATER)
    trainer(run, **EACH).fit()
    skipped = [
        line for line in capsys.readouterr().out.splitlines() if "skipping checkpoint" in line
    ]
    assert len(skipped) == 1 and "step-" in skipped[0] and name in skipped[0]
    ours, theirs = (load_file(out / "checkpoints" / LATER / MODEL_FILE) for out in (run, whole))
    assert same_tensors(ours, theirs)
    assert metrics(run) == metrics(whole)


def test_a_checkpoint_of_another_model_changes_nothing(run: Path) -> None:
    other = trainer(run.parent / "other", "DreamModel")
    before = [parameter.clone() for parameter in other.model.parameters()]
    del other.model.blocks[1]
    with pytest.raises(checkpoint.UnusableCheckpointError, match="another model"):
        checkpoint.load_checkpoint(run / "checkpoints" / LATER, other.model, other.optimizers)
    assert all(map(torch.equal, other.model.blocks.parameters(), before[1:]))


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"settings": 5}', '{"settings"', "\0"])
def test_a_damaged_description_is_named(run: Path, text: str | None) -> None:
    (run / "run.json").unlink()
    if text is not None:
        (run / "run.json").write_text(text)
    with pytest.raises(ValueError, match="run.json"):
        trainer(run, **EACH)


@pytest.mark.parametrize("line", ["", "{", "{}", "[]", '{"step": null}', "5"])
def test_lines_of_metrics_that_were_cut_off_are_dropped(run: Path, line: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line)
    trainer(run, **EACH).fit(3)
    assert [entry["step"] for entry in metrics(run)] == [1, 2, 3]


HOLD = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(600)
"""


def test_a_second_trainer_in_a_folder_is_refused(run: Path) -> None:
    with lock_folder(run), pytest.raises(ValueError, match="another process"):
        trainer(run, **EACH).fit()
    before, command = metrics(run), [sys.executable, "-c", HOLD, str(run / LOCK_FILE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline()
        with pytest.raises(ValueError, match="another process is training in"):
            trainer(run, **EACH).fit()
        other.kill()
    assert metrics(run) == before
    trainer(run, **EACH).fit(3)
    assert len(losses(run)) == 3


def test_a_full_disk_does_no_harm(run: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    half = (run / "checkpoints" / LATER / MODEL_FILE).stat().st_size // 2
    again = trainer(run, **{**EACH, "steps": 3})
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, hard))
    try:
        with pytest.raises(ValueError, match="step-00000003"):
            again.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [EARLIER, LATER]
    trainer(run, **{**EACH, "steps": 3}).fit()
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [LATER, "step-00000003"]
