"""The compiled loops and their threads have no invalid access and no undefined behaviour."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outpace.kernels import tiles
from outpace.kernels.tiles import TILE_LOOPS
from shown import ROOT

pytestmark = pytest.mark.nightly

KERNELS = ROOT / "src/outpace/kernels"
COMPILER = shutil.which("gcc")
MISSING = "no gcc: apt-get install gcc"
TESTS = [f"tests/kernels/test_{name}.py" for name in ("tiles", "packed", "int4", "gated_delta")]
TESTS.append("tests/attention/test_compiled.py")
PROGRAM = """
import sys
from types import SimpleNamespace

import pytest

from outpace.kernels import loader

loader.find_spec = lambda _: SimpleNamespace(origin=sys.argv[1])
loader.thread_count = lambda work: 3
options = ["--nightly", "-q", "-p", "no:cacheprovider"]
status = pytest.main([*options, "-k", "not without_a_compiler", *sys.argv[2:]])
print("loaded", loader.load_library()._name)
sys.exit(status)
"""
"""Runs tests with another library, and always with several threads."""


@pytest.fixture(scope="module")
def preloaded() -> str:
    """Return the sanitizer's library, which must precede Python's own allocations."""
    if COMPILER is None:
        pytest.skip(MISSING)
    if not any(map(tiles.has_tile_loop, TILE_LOOPS)):
        pytest.skip("this machine has no compiled loops to run")
    command = [COMPILER, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("gcc has no libasan: apt-get install libgcc-14-dev")
    return found


def test_the_loops_are_clean(preloaded: str, tmp_path: Path) -> None:
    library = str(tmp_path / "loops.so")
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    flags = ("-O1", "-g1", "-fPIC", "-shared", *checks)
    build = ["gcc", *flags, "-o", library, *sorted(KERNELS.glob("*.c"))]
    subprocess.run(build, check=True, timeout=900)
    env = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [sys.executable, "-c", PROGRAM, library, *TESTS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    assert run.stdout.endswith(f"loaded {library}\n")


@pytest.mark.skipif(COMPILER is None, reason=MISSING)
@pytest.mark.parametrize("option", ["-fopenmp", "-fno-openmp", "-fsanitize=thread"])
def test_threads_make_each_call_once(option: str, tmp_path: Path) -> None:
    sources = [Path(__file__).parent / "parallel_calls.c", KERNELS / "parallel.c"]
    program = tmp_path / "calls"
    flags = ["-O2", "-pthread", option, "-Wl,--no-as-needed", f"-I{KERNELS}"]
    command = ["gcc", *flags, "-o", program, *sources]
    built = subprocess.run(command, capture_output=True, text=True)
    if option == "-fsanitize=thread" and "tsan" in built.stderr:
        pytest.skip("gcc has no libtsan: apt-get install libgcc-14-dev")
    assert built.returncode == 0, built.stderr
    env = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
