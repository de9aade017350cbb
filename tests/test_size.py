"""Small files and small functions; the budget of the plan."""

from __future__ import annotations

import ast

import pytest

from source import MODULES, ROOT

FILE, METHOD, FAMILY, FUNCTION = 400, 200, 80, 60
LIBRARY = 10_000


def limit(module: str) -> int:
    """Lines that a file may have."""
    match module.split("/"):
        case ["methods", _]:
            return METHOD
        case ["models", "families", _]:
            return FAMILY if module != "models/families/family.py" else FILE
    return FILE


def lines(module: str) -> int:
    """Lines of a file."""
    return len((ROOT / module).read_text().splitlines())


@pytest.mark.parametrize("module", MODULES)
def test_file_is_small(module: str) -> None:
    """A page or a few."""
    assert lines(module) <= limit(module)


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_small(module: str) -> None:
    """Signature and docstring included."""
    functions = (
        node
        for node in ast.walk(MODULES[module])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno}
    assert not {name: count for name, count in long.items() if count > FUNCTION}


def test_library_is_small() -> None:
    """As a whole."""
    assert sum(map(lines, MODULES)) <= LIBRARY


def test_limits_differ_by_what_a_file_is() -> None:
    """Methods and families are the shortest."""
    assert [
        limit(module)
        for module in ("engine/engine.py", "methods/apd.py", "models/families/dream.py")
    ] == [FILE, METHOD, FAMILY]
