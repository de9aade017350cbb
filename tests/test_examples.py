"""Examples run, and documentation shows only what works."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.cli.app import build
from outpace.cli.main import main
from outpace.cli.measure import parse_entry
from outpace.cli.options import parse_method
from outpace.evaluation import run
from outpace.methods import METHODS, Autoregressive
from outpace.training import recipe
from outpace.zoo.story import problems

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

ANSWERS = {
    "At the zoo 3 birds": "15",
    "Lily plays 4 games": "26",
    "Lily reads 2 pages": "46",
    "Omar counts 60 people": "64",
    "Tom picks 4 baskets": "19",
}
"""How the questions begin that are shown, and their answers."""

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


def blocks(path: Path, language: str) -> list[str]:
    """Fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def is_right(shown: str, printed: str) -> bool:
    """Whether the questions that are shown got their answers, and no other."""
    given = set(re.findall(r"#### (\d+)", printed.replace("|", "")))
    return given == {answer for question, answer in ANSWERS.items() if question in shown}


def commands(path: Path) -> Iterator[list[str]]:
    """Lines of a page's shell blocks, in words."""
    for block in blocks(path, "sh"):
        yield from (shlex.split(line) for line in block.splitlines())


def headings(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And answers rightly; of an evaluation two questions will do."""
    questions = run.questions_of
    monkeypatch.setattr(run, "questions_of", lambda task, limit: questions(task, min(limit, 2)))
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    assert is_right(path.read_text(), printed)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_own_method_gives_the_text_of_one_token_per_forward(temperature: float) -> None:
    """In fewer forwards."""
    lookup = runpy.run_path(str(ROOT / "examples" / "own_method.py"))["PromptLookup"]
    stories = [problem.question for problem in problems("test", 6)]
    llm = LLM("tiny-aux")
    plain, fast = (
        llm.generate(stories, method=method, max_tokens=96, temperature=temperature, seed=1)
        for method in (Autoregressive(), lookup(match=1))
    )
    assert [output.ids for output in plain] == [output.ids for output in fast]
    assert sum(o.forwards for o in fast) < sum(o.forwards for o in plain)


@page
def test_snippets_run(
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a page one after the other; tests among them are called, and answers are right."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": path.stem}
    for block in blocks(path, "python"):
        exec(compile(block, path.name, "exec", dont_inherit=True), names)
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test()
    assert is_right("".join(blocks(path, "python")), capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        words
        for path in PAGES
        for words in commands(path)
        if words[1] in ("generate", "race", "trace") and any(w.endswith("?") for w in words)
        if not any("/" in word for word in words)
    ],
    ids=lambda words: " ".join(words[1:3])[:30],
)
def test_questions_of_commands_are_answered_rightly(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the flags that are shown; of a trace, the text."""
    _, command, *rest = words[: words.index("--png")] if "--png" in words else words
    with pytest.raises(SystemExit) as ended:
        main([command.replace("trace", "generate"), *rest])
    assert not ended.value.code
    assert is_right(" ".join(rest), capsys.readouterr().out)


@pytest.mark.parametrize("name", ["own_method", "own_diffusion"])
def test_page_on_methods_shows_the_example(name: str) -> None:
    """Word for word."""
    code = (ROOT / "examples" / f"{name}.py").read_text()
    body = code[code.index("@dataclass") : code.index("\n\n\ndef main")]
    assert any(body in block for block in blocks(ROOT / "docs" / "adding-a-method.md", "python"))


@page
def test_commands_are_accepted(path: Path) -> None:
    """Every `outpace` has such a command, flags and method; every `make` such a target."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for program, *words in commands(path):
        if program == "make":
            assert set(words) <= set(targets)
        if program != "outpace":
            continue
        command: Any = build()
        while hasattr(command, "commands"):
            name, *words = words
            command = command.commands[name]
        given = command.make_context(name, words).params
        for entry in given.get("entry") or ():
            parse_entry(entry)
        if method := given.get("method"):
            fields = METHODS[method].__dataclass_fields__
            parse_method(method, {k: v for k, v in given.items() if k in fields and v is not None})
        if "recipe" in given:
            recipe.load(ROOT / given["recipe"], given["overrides"] or ())


def test_recipe_shown_is_one(tmp_path: Path) -> None:
    """Its sections and keys are known."""
    (shown,) = blocks(ROOT / "docs" / "training.md", "toml")
    (tmp_path / "shown.toml").write_text(shown)
    assert recipe.load(tmp_path / "shown.toml").objective


@page
def test_links_lead_somewhere(path: Path) -> None:
    """To a file of the repository, and to a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target
