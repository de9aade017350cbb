"""The package's own source, for the tests that read it."""

from __future__ import annotations

import ast
from pathlib import Path

import outpace

ROOT = Path(outpace.__file__).parent


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module in a folder, by its path in it."""
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    return {path: ast.parse((root / path).read_text(), path) for path in paths}


MODULES = modules(ROOT)
