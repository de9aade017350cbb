"""Calls on several threads: each number once, by the pool and by OpenMP."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from shown import ROOT

COMPILER = shutil.which("gcc") or shutil.which("cc")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("option", ["-fopenmp", "-fno-openmp", "-fsanitize=thread"])
def test_each_number_is_called_once(option: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    kernels = ROOT / "src" / "outpace" / "kernels"
    sources = [Path(__file__).parent / "parallel_calls.c", kernels / "parallel.c"]
    program = tmp_path / "calls"
    flags = ["-O2", "-pthread", option, f"-I{kernels}"]
    command = [COMPILER, *flags, "-o", str(program), *map(str, sources)]
    built = subprocess.run(command, capture_output=True, text=True)
    if option == "-fsanitize=thread" and "tsan" in built.stderr:
        pytest.skip("the compiler has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    env = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
