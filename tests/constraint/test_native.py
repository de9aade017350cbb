"""Test that hostile constraints end neither the process nor its memory, in child processes."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("native.py")


def run_program(*args: object) -> str:
    """Run a program; returns what it prints. A signal is a negative exit status."""
    command = [sys.executable, str(PROGRAM), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr[-2000:])
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("begin", range(0, 1000, 200))
def test_hostile_constraints_end_no_process(begin: int) -> None:
    lines = run_program("hostile", begin, begin + 200).splitlines()
    assert {"True", "False"} == {line.split()[-1] for line in lines if line}


@pytest.mark.nightly
@pytest.mark.parametrize("begin", range(0, 500, 100))
def test_damaged_tokenizers_end_no_process(begin: int) -> None:
    lines = run_program("tokenizers", begin, begin + 100).splitlines()
    assert {"True", "False"} == {line.split()[-1] for line in lines if line}


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the process from /proc")
def test_distinct_constraints_take_bounded_memory() -> None:
    first, *_, last = map(float, run_program("distinct", 0, 1000).split())
    assert last < first + 40  # MiB
