"""Files and functions stay small."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

from source import MODULES, ROOT, modules

FILE, METHOD, FAMILY = 350, 200, 80
FUNCTION, MEDIAN = 60, 8
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PROGRAMS = modules(BENCHMARKS)
EVERY = {**MODULES, **{f"benchmarks/{name}": tree for name, tree in PROGRAMS.items()}}


def limit(module: str) -> int:
    """Lines that a file may have."""
    match module.split("/"):
        case ["methods", _]:
            return METHOD
        case ["checkpoints", "families", name] if name != "family.py":
            return FAMILY
    return FILE


def lines(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text().splitlines())


def functions(tree: ast.Module) -> dict[str, int]:
    """Lines of each function of a file, signature and docstring included."""
    return {
        f"{node.name}, line {node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_files_are_small() -> None:
    """A page or a few; those of the benchmarks as well."""
    large = {m: lines(ROOT / m) for m in MODULES if lines(ROOT / m) > limit(m)}
    large |= {p: lines(BENCHMARKS / p) for p in PROGRAMS if lines(BENCHMARKS / p) > FILE}
    assert not large


def test_functions_are_small() -> None:
    """Each of them."""
    assert not {
        f"{module}: {name}": count
        for module, tree in EVERY.items()
        for name, count in functions(tree).items()
        if count > FUNCTION
    }


def test_half_of_the_functions_are_tiny() -> None:
    """A large file is not made small by a few long functions."""
    assert median(n for tree in MODULES.values() for n in functions(tree).values()) <= MEDIAN


def test_limits_differ_by_what_a_file_is() -> None:
    """Methods and families are the shortest."""
    assert [
        limit(module)
        for module in ("engine/runner.py", "methods/apd.py", "checkpoints/families/dream.py")
    ] == [FILE, METHOD, FAMILY]
    assert limit("checkpoints/families/family.py") == FILE
