"""An option is declared once; few further places name it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from outpace.api.loading import LOAD_OPTIONS
from outpace.api.options import REQUEST_OPTIONS
from source import MODULES

MOST = 4
"""Places of an option: its declaration, what type checkers read, and two that use it apart."""

PLACES = (
    *(
        "api/options.py",
        "api/effects.py",
        "api/llm.py",
        "cli/flags.py",
        "decoding/sampling_params.py",
    ),
    *(
        "server/schema.py",
        "server/constraint_fields.py",
        "server/fields.py",
        "server/request_handler.py",
    ),
    *("server/settings.py", "api/engine_client.py", "api/engine_loop.py", "api/loading.py"),
)
"""Where options are declared, and where lists of them could stand a second time."""


def strings(node: ast.AST) -> Iterator[str]:
    """Texts that are entries of a table, or keys of one; texts of calls are not."""
    match node:
        case ast.Dict(keys=entries) | ast.Tuple(elts=entries):
            yield from (e.value for e in entries if isinstance(e, ast.Constant))
        case ast.List(elts=entries) | ast.Set(elts=entries):
            yield from (e.value for e in entries if isinstance(e, ast.Constant))


def places(tree: ast.Module) -> Counter[str]:
    """Names that a module lists: fields of classes, parameters of an `LLM`, entries of tables."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            found.update(field.id for field in fields if isinstance(field, ast.Name))
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            found.update(each.arg for each in node.args.kwonlyargs)
        found.update(text for text in strings(node) if isinstance(text, str))
    return found


@pytest.fixture(scope="module")
def counted() -> dict[str, Counter[str]]:
    """Names by module."""
    return {name: places(MODULES[name]) for name in PLACES}


def fields_in(counted: dict[str, Counter[str]], name: str) -> dict[str, int]:
    """The modules that name an option, with how often."""
    return {module: count for module, names in counted.items() if (count := names[name])}


def test_request_option_stands_in_few_places(counted: dict[str, Counter[str]]) -> None:
    found = {name: fields_in(counted, name) for name in REQUEST_OPTIONS if name != "method"}
    for name, where in found.items():
        print(f"{name}: {sum(where.values())} {where}")
    assert not {name: where for name, where in found.items() if sum(where.values()) > MOST}


def test_loading_option_stands_in_few_places(counted: dict[str, Counter[str]]) -> None:
    found = {name: fields_in(counted, name) for name in LOAD_OPTIONS}
    for name, where in found.items():
        print(f"{name}: {sum(where.values())} {where}")
    assert not {name: where for name, where in found.items() if sum(where.values()) > MOST}
