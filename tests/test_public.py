"""Names that users rely on, and registries that must be whole."""

import ast
import inspect
import re
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import outpace
import outpace.decoding
import outpace.methods
from outpace.checkpoints.families import FAMILIES, Family
from outpace.methods import METHODS, Method
from source import ROOT

DOCS = Path(__file__).parent.parent / "docs"
PUBLIC = [outpace, outpace.decoding, outpace.methods]


def import_order(name: str) -> tuple[bool, bool, str]:
    """Constants, classes, functions, as sorted imports stand."""
    return not name.isupper(), not name[0].isupper(), name


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_are_listed_and_sorted(module: ModuleType) -> None:
    assert all(hasattr(module, name) for name in module.__all__)
    offered = {
        name
        for name, value in vars(module).items()
        if not (name.startswith("_") or inspect.ismodule(value) or name == "annotations")
    }
    listed = [name for name in module.__all__ if not name.startswith("_")]
    assert set(listed) == offered
    assert module.__all__ == sorted(module.__all__, key=import_order)


HELP_OF_ALL = """
from outpace.cli.app import COMMANDS
from outpace.cli.main import main
for command in COMMANDS:
    try:
        main([*command.split(), "--help"])
    except SystemExit as ended:
        assert not ended.code, command
"""


@pytest.mark.parametrize(
    ("command", "loaded"),
    [
        (HELP_OF_ALL, []),
        ("from outpace import OptionError", []),
        ("from outpace.cli.main import main; main(['--help'])", []),
        ("from outpace.cli.app import open_server; open_server(['serve'])", []),
        pytest.param(
            "from outpace import LLM; LLM('tiny-ar').generate('a', max_tokens=1)",
            ["numpy", "torch"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_heavy_packages_are_loaded_only_when_used(command: str, loaded: list[str]) -> None:
    code = f"""
import atexit, sys
@atexit.register
def print_loaded():
    heavy = {{"torch", "transformers", "numpy"}} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
{command}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == f"{loaded}\n"


@pytest.mark.nightly
def test_help_does_not_wait() -> None:
    words = [sys.executable, "-m", "outpace", "generate", "--help"]
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 1  # 0.6 as measured, and 4 with PyTorch


def test_names_are_listed_before_they_are_loaded() -> None:
    code = "import outpace; print(set(outpace.__all__) <= set(dir(outpace)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    with pytest.raises(AttributeError, match="LLMs"):
        outpace.LLMs  # noqa: B018


PROGRAM = """
from collections.abc import Mapping

import numpy as np
from outpace import LLM, AsyncLLM, OptionError, Output, __version__
from outpace.decoding import {decoding}
from outpace.methods import {methods}

used: tuple[object, ...] = (AsyncLLM, OptionError, __version__, {decoding}, {methods})
by_name: Mapping[str, type[Method]] = METHODS
llm = LLM("tiny-dream", ("apd", {{"verifier": "tiny-aux"}}), max_length=64, cache_gib=0.5)
one: list[Output] = llm.generate("hi", method="left_to_right", stop_ids=np.array([1]), min_p=0.1)
several: list[list[Output]] = llm.generate(["hi", "you"], n=2, template={{"x": True}})
text: str = "".join(llm.stream([{{"role": "user", "content": "hi"}}], method=LeftToRight()))
rates: list[float] = [output.tokens_per_forward for outputs in several for output in outputs]


async def ask() -> float:
    served = AsyncLLM(llm)
    async for piece in served.stream("hi", seed=1, logit_bias={{1: 2.0}}):
        print(piece.upper())
    return (await served.generate("hi")).tokens_per_second
"""


@pytest.mark.nightly
def test_a_user_s_program_is_typed(tmp_path: Path) -> None:
    program = PROGRAM.format(
        decoding=", ".join(outpace.decoding.__all__), methods=", ".join(outpace.methods.__all__)
    )
    (tmp_path / "right.py").write_text(program)
    (tmp_path / "wrong.py").write_text("import outpace\noutpace.LLMs\n")
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(found) == 1, done.stdout
    assert found[0].startswith("wrong.py:2: ") and 'no attribute "LLMs"' in found[0]


def test_every_method_of_the_folder_is_registered() -> None:
    found = {}
    for path in (ROOT / "methods").glob("*.py"):
        module = import_module(f"outpace.methods.{path.stem}")
        for value in vars(module).values():
            is_method = inspect.isclass(value) and issubclass(value, Method)
            if is_method and not inspect.isabstract(value):
                found[value.__module__.rpartition(".")[2]] = value
    assert found == METHODS
    assert list(METHODS) == sorted(METHODS)
    assert len(METHODS) >= 3


def test_every_family_of_the_folder_is_registered() -> None:
    found = {}
    for path in (ROOT / "checkpoints" / "families").glob("*.py"):
        module = import_module(f"outpace.checkpoints.families.{path.stem}")
        families = (value for value in vars(module).values() if isinstance(value, Family))
        found |= {family.name: family for family in families}
    assert found == FAMILIES
    names = [name for family in FAMILIES.values() for name in family.architectures]
    assert len(names) == len(set(names))


def test_every_method_has_its_section_and_its_row_in_the_docs() -> None:
    text = (DOCS / "methods.md").read_text()
    known = {spelling: name for name, kind in METHODS.items() for spelling in (name, kind.__name__)}
    cells = re.findall(r"^\|\s*\[?`(\w+)`", text, flags=re.MULTILINE)
    assert sorted(known[cell] for cell in cells if cell in known) == sorted(METHODS)
    headings = " ".join(re.findall(r"^#{2,3} .*$", text, flags=re.MULTILINE))
    for name, kind in METHODS.items():
        assert name in headings or kind.__name__ in headings


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    listed = set(re.findall(r"`(\w+)`", text))
    training = (ROOT / "training" / "__init__.py").read_text().partition("__all__ = ")[2]
    names = {name for module in PUBLIC for name in module.__all__}
    names |= set(ast.literal_eval(training))
    names -= {"__version__", *(kind.__name__ for kind in METHODS.values())}
    assert names <= listed


def test_every_family_has_its_row_in_the_docs() -> None:
    text = (DOCS / "models.md").read_text().partition("## Families")[2].partition("\n#")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:3] == "| `"]
    assert {row[0].strip("`") for row in rows} == set(FAMILIES)
    for name, architectures, _, kind, method in rows:
        family = FAMILIES[name.strip("`")]
        assert tuple(re.findall(r"`(\w+)`", architectures)) == family.architectures
        assert "draft" in kind or method == f"`{METHODS[family.method].__name__}`"


def code(tree: ast.Module) -> set[str]:
    """Identifiers and strings of a module; neither comments nor docstrings."""
    found = set()
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                found.add(text)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                found.add(name)
    return found
