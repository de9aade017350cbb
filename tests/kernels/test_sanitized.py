"""The compiled loops have no invalid memory access and no undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.kernels import tiles
from outpace.kernels.tiles import TILE_LOOPS
from shown import ROOT

SOURCES = sorted((ROOT / "src/outpace/kernels").glob("*.c"))
CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def preloaded() -> str:
    """Return the sanitizer's library, which must precede Python's own allocations."""
    if (gcc := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc")
    if not any(map(tiles.has_tile_loop, TILE_LOOPS)):
        pytest.skip("this machine has no compiled loops to run")
    command = [gcc, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("gcc has no libasan")
    return found


@pytest.mark.nightly
def test_the_loops_are_clean(preloaded: str, tmp_path: Path) -> None:
    library = tmp_path / "loops.so"
    flags = ("-O1", "-g1", "-fopenmp", "-fPIC", "-shared", *CHECKS)
    build = ["gcc", *flags, "-o", str(library), *map(str, SOURCES)]
    run = subprocess.run(build, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    env = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("src", "tests")),
    }
    command = [sys.executable, str(ROOT / "tests" / "sanitized.py"), str(library)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    products, passes, packed, recurrences = map(int, run.stdout.split())
    assert products > 200 and passes > 200 and packed > 200 and recurrences > 30
