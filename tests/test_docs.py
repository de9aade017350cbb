"""Commands, snippets, recipes and links of the documentation work.

A command that is not run here has a mark after it, or above it for all that follow in its block:
`# hub` (downloads weights or data, or reads a file of the user), `# long` (minutes or hours),
`# ray` (needs that extra), `# serves` (until it is stopped). The parser must accept it.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.hub import ZOO_TOKENIZER
from outpace.cli.app import load_command
from outpace.cli.main import main
from outpace.cli.options import parse_method
from outpace.lab.entry import parse_entries
from outpace.methods.options import open_method
from outpace.training import recipe
from outpace.training.data import Data, Examples
from shown import ROOT, blocks, is_right

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *(ROOT / "benchmarks" / "results" / name for name in ("README.md", "claims.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MARKS = ("hub", "long", "ray", "serves")
BRIEF = {
    "benchmark": ["--limit", "2", "--rounds", "2"],
    "evaluate": ["--limit", "2"],
    "race": ["--limit", "2"],
}
"""Options that shorten a command."""

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")


def commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the mark and the words of each command in a page's shell blocks."""
    for block in blocks(path, "sh"):
        above = ""
        for line in block.splitlines():
            match = re.fullmatch(r"(.*?)\s*(?:# (\w+))?", line)
            assert match is not None
            code, mark = match.groups()
            assert mark is None or mark in MARKS, f"{path.name}: no mark {mark!r}: {line}"
            if code:
                yield mark or above, shlex.split(code)
            else:
                above = mark or ""


def headings(path: Path) -> set[str]:
    """Return the anchors of a page's headings on GitHub."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (path.stem == "training"))
        for path in PAGES
        if blocks(path, "python")
    ],
)
def test_snippets_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": path.stem}
    for block in blocks(path, "python"):
        exec(compile(block, path.name, "exec", dont_inherit=True), names)
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test()
    assert is_right("".join(blocks(path, "python")), capsys.readouterr().out)


def write_inputs(folder: Path) -> None:
    """Write the files that commands of the pages read and no other command writes."""
    lines = [{"prompt": "Tom has 5 bags of 4 apples."}, {"prompt": "Amy has 3 hats."}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "mine.jsonl").write_text("\n".join(blocks(ROOT / "docs/evaluation.md", "json")))
    (folder / "my-tasks").mkdir()
    (folder / "my-tasks" / "test.jsonl").write_text('{"question": "2 + 2? ", "answer": "4"}\n')
    (folder / "my-tasks" / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'my-tasks' / 'test.jsonl'}}}}}\n"
        "test_split: test\noutput_type: generate_until\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        "generation_kwargs: {max_gen_toks: 16, until: []}\n"
        "metric_list: [{metric: exact_match}]\n"
    )


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.nightly] * (path.stem != "README"), id=path.stem)
        for path in PAGES
        if any(not mark for mark, _ in commands(path))
    ],
)
def test_commands_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("sys.stdin", io.StringIO("Tom has 3 apples and buys 4 more.\n"))
    for mark, (program, *words) in commands(path):
        if mark or program != "outpace":
            continue
        printed = run_command(words, capsys)
        if not any(word.endswith("?") for word in words):
            continue
        if words[0] == "trace":
            words = words[: words.index("--png")] if "--png" in words else words
            printed = run_command(["generate", *words[1:]], capsys)
        assert is_right(" ".join(words), printed), words


def run_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints; it must succeed."""
    with pytest.raises(SystemExit) as ended:
        main([*words, *BRIEF.get(words[0], ())])
    shown = capsys.readouterr()
    assert not ended.value.code, (words, shown.err)
    return shown.out


@page
def test_commands_are_accepted(path: Path) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for _, (program, *words) in commands(path):
        match program:
            case "make":
                assert set(words) <= set(targets)
            case "pip":
                assert set(re.findall(r"\[(\w+)\]", words[-1])) <= extras()
            case "python":
                is_program = words[0].endswith(".py") and (ROOT / words[0]).is_file()
                is_module = words[0] == "-m" and find_spec(words[1])
                assert words[0] == "-c" or is_program or is_module
            case "outpace":
                check(words)
            case "torchrun":
                assert words[2:4] == ["-m", "outpace"] and words[1] == words[-1]
                check(words[4:])
            case _:
                assert program in (".", "curl", "mkdir")


def check(words: list[str]) -> None:
    """Parse a command, with its method, entries and recipe."""
    command: Any = load_command(words)
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            words = ["recipe", *words]
        name, *words = words
        command = command.commands[name]
    given = command.make_context(command.name, words).params
    for entry in [*(given.get("entry") or ()), *(given.get("entries") or ())]:
        assert " " not in entry or parse_entries(entry)
    if method := given.get("method"):
        fields = open_method(method).__dataclass_fields__
        parse_method(method, {k: v for k, v in given.items() if k in fields and v is not None})
    if "recipe" in given:
        recipe.load_recipe(given["recipe"], given["overrides"] or ())


def test_extras_that_are_named_exist() -> None:
    texts = [path.read_text() for path in (*PAGES, *(ROOT / "src").rglob("*.py"))]
    named = [n for text in texts for n in re.findall(r"(?:'\.\[|install_extra\(')([\w,]+)", text)]
    assert {"serve", "llama"} <= {*",".join(named).split(",")} <= extras()


@pytest.mark.parametrize("name", ["own_method", "own_diffusion"])
def test_page_on_methods_shows_the_example(name: str) -> None:
    code = (ROOT / "examples" / f"{name}.py").read_text()
    body = code[code.index("@dataclass") : code.index("\n\n\ndef main")]
    assert any(body in block for block in blocks(ROOT / "docs" / "adding-a-method.md", "python"))


def test_recipe_shown_is_one(tmp_path: Path) -> None:
    pages = sorted((ROOT / "docs").glob("training*.md"))
    shown = [text for path in pages for text in blocks(path, "toml")]
    (whole,) = (text for text in shown if "[model]" in text)
    (tmp_path / "shown.toml").write_text(whole)
    apart = [
        f"{section}.{key}={json.dumps(value)}"
        for text in shown
        if text != whole
        for section, table in tomllib.loads(text).items()
        for key, value in table.items()
    ]
    read = recipe.load_recipe(tmp_path / "shown.toml", apart)
    assert read.objective and read.held_out and read.train.tokens and read.data.features


def test_data_shown_is_read(tmp_path: Path) -> None:
    (shown,) = blocks(ROOT / "docs" / "training.md", "json")
    (tmp_path / "shown.jsonl").write_text(shown)
    tokenizer = load_tokenizer(ZOO_TOKENIZER)
    assert tokenizer is not None
    examples = Examples(Data(path=str(tmp_path / "shown.jsonl")), tokenizer)
    assert examples[0] == examples[1]


@page
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


def test_tour_quotes_the_source() -> None:
    _, *parts = (ROOT / "docs" / "tour.md").read_text().split("\n### `")
    for name, text in (part.split("`", 1) for part in parts):
        source = " ".join((ROOT / name).read_text().split())
        quotes = re.findall(r"^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for quote in quotes:
            for lines in re.split(r"^…$", quote, flags=re.MULTILINE):
                assert " ".join(lines.split()) in source, (name, lines)
        assert quotes, name
