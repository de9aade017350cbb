"""What an optional package is missing for is skipped; the rest runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optional import OPTIONAL

ROOT = Path(__file__).parent.parent
HIDDEN = frozenset(OPTIONAL) - {"httpx2", "pydantic"}
"""All but those that packages of the core may need themselves."""
HIDE = f"""
import sys
from importlib.machinery import PathFinder


class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in {set(HIDDEN)!r}:
            return super().find_spec(fullname, path, target)


sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""
HELP_OF_ALL = """
from outpace.cli.app import COMMANDS
from outpace.cli.main import main

for name in COMMANDS:
    try:
        main([*name.split(), "--help"])
    except SystemExit as ended:
        assert not ended.code, name
"""
FAILING = """
import pytest


def test_of_an_absent_package():
    import matplotlib


def test_of_an_absent_module_of_our_own():
    import outpace.none


def test_of_nothing():
    pass
"""


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process that sees no optional package."""
    (tmp_path / "hide.py").write_text(HIDE)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "hide", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )


@pytest.mark.nightly
def test_only_what_needs_an_absent_package_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_some.py").write_text(FAILING)
    (tmp_path / "test_file.py").write_text("import triton\n")
    done = run(tmp_path, "-rs", f"--config-file={ROOT / 'pyproject.toml'}", str(tmp_path))
    assert "1 failed, 1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
    assert "matplotlib is not installed" in done.stdout
    assert "triton is not installed" in done.stdout


@pytest.mark.nightly
def test_help_needs_no_optional_package() -> None:
    program = HIDE + HELP_OF_ALL
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.nightly
def test_collection_needs_no_optional_package(tmp_path: Path) -> None:
    done = run(tmp_path, "--collect-only", "tests")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "tests/methods/test_naive.py::test_autoregressive" in done.stdout
    assert "tests/server/test_document.py::" not in done.stdout
