"""Check that the tests notice faults: python tests/mutants.py [NAME ...] [--nightly].

Each patch in `tests/mutants/` puts one fault into the package. The tests near the fault, as
`make near` would select them, run on a copy with the fault until one fails; that test must pass
without the fault. A fault that no test notices survives, and the exit status is 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

from near import ROOT, near_tests

PATCHES = ROOT / "tests" / "mutants"
COPIED = ("src", "tests", "benchmarks", "docs", "examples", "deploy", "README.md", "Makefile")
COPIED += ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "pyproject.toml")
STAGE = 40
"""Test files that one process collects; the nearest come first, and a fault ends the rest."""
LIMIT = 900.0
"""Seconds after which a process of tests counts as one that does not end, and so as a failure."""


@dataclass(frozen=True)
class Verdict:
    """What happened to a mutant: the test that failed, or none."""

    name: str
    test: str | None
    seconds: float

    def __str__(self) -> str:
        fate = f"killed by {self.test}" if self.test else "SURVIVED"
        return f"{self.name:40} {self.seconds:5.0f} s  {fate}"


def copy_project(folder: Path) -> None:
    """Copy what the tests read; libraries that are compiled in place come along."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def apply_patch(folder: Path, patch: Path, *options: str) -> None:
    command = ["patch", "--quiet", "--strip=1", "--no-backup-if-mismatch", *options]
    done = subprocess.run(
        [*command, "--input", patch], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{patch.name} does not apply: {done.stdout}{done.stderr}")


def run_tests(folder: Path, tests: Sequence[str], options: Sequence[str]) -> str | None:
    """Run tests in a copy until one fails; return its name, if one does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-rfE"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"the limit of {LIMIT:.0f} seconds"
    if done.returncode in (0, 5):  # 5: all tests were left out
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?|\S+)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit status {done.returncode}: {done.stdout[-300:]}"


def try_mutant(folder: Path, patch: Path, options: Sequence[str]) -> Verdict:
    """Run the tests near a fault on a copy that has it."""
    began = perf_counter()
    changed = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE)
    tests = near_tests(changed)
    apply_patch(folder, patch)
    try:
        stages = (tests[first : first + STAGE] for first in range(0, len(tests), STAGE))
        failures = (run_tests(folder, stage, options) for stage in stages)
        test = next(filter(None, failures), None)
    finally:
        apply_patch(folder, patch, "--reverse")
    if test and test.startswith("tests/") and run_tests(folder, [test], ["--nightly"]):
        sys.exit(f"{test} fails without {patch.stem} too")
    return Verdict(patch.stem, test, perf_counter() - began)


def main() -> None:
    """Try the mutants, two at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to try; all by default")
    parser.add_argument("--nightly", action="store_true", help="run the long tests too")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    patches = [PATCHES / f"{name}.patch" for name in given.names]
    patches = patches or sorted(PATCHES.glob("*.patch"))
    options = ["--nightly"] if given.nightly else []
    folders: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(given.processes) as pool:
        for index in range(given.processes):
            copy_project(Path(root, str(index)))
            folders.put(Path(root, str(index)))

        def attempt(patch: Path) -> Verdict:
            folder = folders.get()
            try:
                verdict = try_mutant(folder, patch, options)
            finally:
                folders.put(folder)
            print(verdict, flush=True)
            return verdict

        verdicts = [*pool.map(attempt, patches)]
    survivors = [verdict.name for verdict in verdicts if verdict.test is None]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} killed")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
