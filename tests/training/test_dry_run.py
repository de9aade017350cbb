"""Tests of dry runs: planned memory equals the memory that a run allocates."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import memory
from outpace.training.recipe import load_recipe
from runs import plan_recipe

CLOSE = 0.1
"""Share of what is allocated by which a plan may miss it."""


def planned(path: Path, processes: int = 1) -> float:
    """Planned peak bytes of the passes of a recipe."""
    made = plan_recipe(load_recipe(path), processes)
    return made.peak.total() + made.optimizer


def processes(path: Path, count: int) -> list[int]:
    """Peak bytes of each process of a sharded run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(
            [sys.executable, str(Path(memory.__file__)), str(path)],
            env={**os.environ, **meeting, "RANK": str(n), "LOCAL_RANK": str(n)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(count)
    ]
    try:
        printed = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), printed
    return [int(re.findall(r"^bytes: (\d+)$", each, re.MULTILINE)[0]) for each in printed]


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param("sft", marks=pytest.mark.nightly),
        pytest.param("dflash", marks=pytest.mark.nightly),
    ],
)
def test_a_plan_says_what_a_run_allocates(objective: str, tmp_path: Path) -> None:
    path = memory.recipe(tmp_path, objective, "recompute = true")
    assert planned(path) == pytest.approx(memory.allocated(path), rel=CLOSE)
