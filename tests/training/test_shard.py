"""Tests of sharded training, which must equal training in one process."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sharded
from outpace.training.checkpoint import MODEL_FILE, OPTIMIZER_FILE, list_checkpoints, part_name
from runs import losses, metrics
from sharded import BEGUN, LATER, STEPS, trainers

FILES = (MODEL_FILE, OPTIMIZER_FILE)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


@pytest.mark.nightly
def test_two_processes_that_share_train_like_one(tmp_path: Path) -> None:
    for name, trainer in trainers(tmp_path / "one", steps=LATER):
        trainer.fit(STEPS)
        if name in BEGUN:
            shutil.copytree(trainer.out, tmp_path / "begun" / name)
        trainer.export(trainer.out / "export")
        trainer.fit()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(sharded.__file__)), str(tmp_path)],
            env={**os.environ, **meeting, "RANK": str(n), "LOCAL_RANK": str(n)},
        )
        for n in range(2)
    ]
    try:
        assert [process.wait(timeout=540) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for name, trainer in trainers(tmp_path / "pair", steps=LATER):
        one, pair, begun = (tmp_path / each / name for each in ("one", "pair", "begun"))
        kept = [*list_checkpoints(pair / "checkpoints")[-1].glob("*.safetensors")]
        assert {path.name for path in kept} == {part_name(f, n, 2) for f in FILES for n in range(2)}
        assert {t.dtype for path in kept for t in load_file(path).values()} == {torch.float32}
        near, same = (1e-2, 2e-2) if name == "bf16" else (1e-4, 2e-3)
        assert losses(pair) == pytest.approx(losses(one)[:STEPS], rel=near), name
        assert metrics(pair)[0].keys() == metrics(one)[0].keys()
        ours, theirs = weights(pair / "export"), weights(one / "export")
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[key], theirs[key], atol=same) for key in ours), name
        trainer.fit()
        assert losses(pair) == pytest.approx(losses(one), rel=near), name
        if name in BEGUN:
            assert losses(begun) == pytest.approx(losses(one), rel=near), name
