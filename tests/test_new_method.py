"""The page on adding a method, applied to a copy of the repository, whose tests then pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shown import blocks

ROOT = Path(__file__).parent.parent
PAGE = "docs/adding-a-method.md"

HEAD = '''"""Prompt lookup: drafts are copied from the text so far (Saxena, 2023)."""

from dataclasses import dataclass
from typing import Annotated

from outpace.decoding import Decoding, Forward, OptionError, Request, agreement
from outpace.methods.method import Method

'''
LOOP = '''

def prompt_lookup(
    model: Transformer,
    prompt: list[int],
    max_tokens: int,
    *,
    tokens: int,
    match: int,
    eos: int | None = None,
) -> Verified:
    """Drafts are the tokens that followed the last few at their latest earlier place."""

    def guess(ids: list[int], room: int) -> list[int]:
        for end in reversed(range(match, len(ids))):
            if ids[end - match : end] == ids[-match:]:
                return ids[end:][: min(tokens, room)]
        return []

    return verified(model, prompt, max_tokens, eos, guess)
'''
COMPARISON = """

@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("match", [1, 2])
def test_it_equals_its_loop(tokens: int, match: int) -> None:
    options = {"tokens": tokens, "match": match}
    for prompt in [*PROMPTS, [3, 1, 4] * 4]:
        loop = partial(naive.prompt_lookup, MODELS["near"], prompt, TOKENS, **options)
        check_verified(new_engine(), PromptLookup(**options), {"target": "near"}, prompt, loop)
"""
IMPORTS = '''"""Prompt lookup, step by step and against its loop."""

from functools import partial

import pytest

import naive
from compared import PROMPTS, TOKENS, check_verified
from outpace.decoding import Prediction, Request
from outpace.methods import PromptLookup
from workload import MODELS, new_engine


'''
ROW = (
    "| `prompt_lookup` | `PromptLookup` | causal models | – | adaptive, up to `tokens` + 1; "
    "lossless |\n"
)
SECTION = """## PromptLookup

*Source:* [Saxena, 2023](https://github.com/apoorvumang/prompt-lookup-decoding).

*Loop:* what followed the last few tokens before is verified in one pass.

| option | default | meaning |
|---|---|---|
| `tokens` | 6 | most tokens copied at a time |
| `match` | 2 | last tokens that an earlier place must have as well |

"""
RANDOM = "lambda rng: PromptLookup(tokens=rng.randint(1, 6), match=rng.randint(1, 2))"


def insert(path: Path, place: str, text: str) -> None:
    """Insert text before a place that a file has once."""
    old = path.read_text()
    assert old.count(place) == 1, (path, place, old.count(place))
    path.write_text(old.replace(place, text + place))


def contribute(root: Path) -> None:
    """Make the edits of the page's table for its worked example."""
    page = blocks(root / PAGE, "python")
    (method,) = (block for block in page if "class PromptLookup" in block)
    (scripted,) = (block for block in page if "def test_prompt_lookup" in block)
    package, tests = root / "src/outpace/methods", root / "tests"
    (package / "prompt_lookup.py").write_text(HEAD + "\n" + method[method.index("@dataclass") :])
    names = package / "__init__.py"
    insert(names, "    from outpace.methods.speculative", IMPORT)
    insert(names, '    "speculative": ', '    "prompt_lookup": "PromptLookup",\n')
    insert(names, '    "Speculative",', '    "PromptLookup",\n')

    with (tests / "naive.py").open("a") as file:
        file.write(LOOP)
    work = tests / "workload.py"
    insert(work, "    Speculative,\n    WeDLM,\n)", "    PromptLookup,\n")
    insert(work, ']\n"""A few options of each method', "    PromptLookup(tokens=3, match=1),\n")
    insert(work, '    ],\n    "tiny-wedlm": [', "        PromptLookup(match=1),\n")
    insert(work, "    WeDLM: lambda rng", f"    PromptLookup: {RANDOM},\n")
    own = IMPORTS + scripted[scripted.index("def test_prompt_lookup") :].rstrip() + "\n"
    (tests / "methods/test_prompt_lookup.py").write_text(own + COMPARISON)

    insert(root / "docs/methods.md", "| `dflash` | `DFlash` |", ROW)
    insert(root / "docs/methods.md", "## DFlash\n", SECTION)
    insert(root / "CHANGELOG.md", "- `WeDLM`: masks", "- `PromptLookup` copies its drafts.\n")


IMPORT = "    from outpace.methods.prompt_lookup import PromptLookup\n"
TESTS = (
    "tests/test_public.py",
    "tests/cli/test_options.py",
    "tests/engine/test_equivalence.py",
    "tests/methods/test_method.py",
    "tests/methods/test_naive.py::test_every_method_has_a_naive_loop",
    "tests/methods/test_options.py",
    "tests/methods/test_prompt_lookup.py",
)
NAMED = "PromptLookup or prompt_lookup or every or mixed or public"
"""Tests of the method, and those that compare the list of methods with others."""


def files(root: Path) -> dict[str, bytes]:
    """Return the content of all files of a tree by path, bytecode excluded."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.nightly
def test_a_method_is_added_as_the_page_says(tmp_path: Path) -> None:
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=leave)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "LICENSE", ROOT / "Makefile"):
        shutil.copy(path, tmp_path)
    before = files(tmp_path)
    contribute(tmp_path)
    after = files(tmp_path)
    edited = {name for name, data in after.items() if before.get(name) != data}
    table = (tmp_path / PAGE).read_text().partition("## Contributing it")[2]
    named = re.findall(r"^\| `([\w./]+)` \|", table.replace("NAME", "prompt_lookup"), re.MULTILINE)
    assert edited == set(named) and before.keys() <= after.keys()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", NAMED, *TESTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= 10, done.stdout
