"""What may import what: arrows point down, and the lowest floor knows only itself."""

from __future__ import annotations

import ast

import pytest

from source import MODULES

SHARED = {"version", "provenance"}
BELOW_OUTPUT = {
    *("attention", "constraint", "decoding", "engine", "layout", "methods", "models", "text"),
}
BELOW_LLM = {"driver", "options", "output", *BELOW_OUTPUT}

FLOORS: dict[str, set[str]] = {
    "attention": {"decoding", "models"},
    "constraint": {"decoding"},
    "decoding": set(),
    "models": {"decoding"},
    "codec": {"models"},
    "markers": {"codec"},
    "chat_template": {"codec", "markers"},
    "text": {"chat_template", "codec", "markers"},
    "version": set(),
    "jsonl": set(),
    "lock": set(),
    "zoo": set(),
    "provenance": {"version"},
    "methods": {"decoding"},
    "engine": {"attention", "decoding", "methods", "models"},
    "recipes": set(),
    "training": {
        *("attention", "decoding", "evaluation", "llm", "lock", "models", "recipes", "zoo"),
        *SHARED,
    },
    "layout": {"constraint", "text"},
    "driver": {"engine"},
    "options": {"constraint", "decoding", "methods"},
    "display": set(),
    "output": {"display", *BELOW_OUTPUT},
    "stream": {"driver", "output"},
    "llm": {"stream", *BELOW_LLM},
    "worker": set(),
    "async_llm": {"constraint", "decoding", "engine", "llm", "options", "output", "text", "worker"},
    "__init__": {"async_llm", "constraint", "llm", "output", "version"},
    "trace": {"decoding", "output"},
    "answers": {"jsonl", "lock", "methods", "options", "output", "text"},
    "evaluation": {"answers", "jsonl", "llm", "zoo", *BELOW_LLM, *SHARED},
    "benchmark": {"evaluation", "jsonl", "llm", *BELOW_LLM},
    "load": {"answers", "evaluation", "text"},
    "server": {"async_llm", "llm", "version", "worker", *BELOW_LLM},
    "ray": {"answers", "evaluation", "llm", "server", *BELOW_LLM},
    "cli": {
        *(
            "answers",
            "benchmark",
            "evaluation",
            "jsonl",
            "llm",
            "load",
            "ray",
            "recipes",
            "server",
            "stream",
        ),
        *("trace", "training", "zoo"),
        *BELOW_LLM,
        *SHARED,
    },
    "__main__": {"cli"},
}
"""What each part of the package may import, itself aside; a new part needs its own line."""


def part(module: str) -> str:
    """Folder or file directly under the package: `engine` of `engine/cache.py`."""
    return module.split("/")[0].removesuffix(".py")


def imported(module: str, tree: ast.Module) -> set[str]:
    """Parts of the package that a module imports, anywhere in it; a relative import is a fault."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            whole = node.module == "outpace"
            names |= {f"outpace.{a.name}" for a in node.names} if whole else {node.module or ""}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = (name.split(".") for name in names)
    return {path[1] if len(path) > 1 else "__init__" for path in ours if path[0] == "outpace"}


def upward(module: str, tree: ast.Module) -> set[str]:
    """Parts that a module imports and may not."""
    return imported(module, tree) - FLOORS[part(module)] - {part(module)}


def test_arrows_point_down() -> None:
    """Each import is of its own part, or of one that it may know."""
    found = {module: upward(module, tree) for module, tree in MODULES.items()}
    assert not {module: parts for module, parts in found.items() if parts}


def test_every_part_has_its_floor() -> None:
    """And no line is left over."""
    assert {part(module) for module in MODULES} == set(FLOORS)


def test_there_is_no_way_round() -> None:
    """Following the arrows never comes back."""

    def below(name: str) -> set[str]:
        return FLOORS[name].union(*(below(each) for each in FLOORS[name]))

    assert all(name not in below(name) for name in FLOORS)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("methods/apd.py", "from outpace.models.config import ModelConfig"),
        ("methods/apd.py", "from outpace import engine"),
        ("methods/apd.py", "import outpace.engine.cache as cache"),
        ("decoding/forward.py", "def f():\n    from outpace.attention.dense import attention"),
        ("training/trainer.py", "from outpace.methods import APD"),
        ("engine/engine.py", "from outpace import LLM"),
        ("models/load.py", "if True:\n    import outpace"),
    ],
)
def test_an_arrow_that_points_up_is_seen(module: str, line: str) -> None:
    """However it is written."""
    assert upward(module, ast.parse(line))
