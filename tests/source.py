"""The package's own source, for the tests that read it."""

from __future__ import annotations

import ast
from pathlib import Path

import outpace

ROOT = Path(outpace.__file__).parent


def modules() -> dict[str, ast.Module]:
    """Every module of the package, by its path in it."""
    paths = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    return {path: ast.parse((ROOT / path).read_text(), path) for path in paths}


MODULES = modules()
