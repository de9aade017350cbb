"""The documentation shows only what works: commands, snippets, recipes, links.

A command that is not run here has a mark after it, or above it for all that follow in its block:
`# hub` (downloads weights or data, or reads a file of the user), `# long` (minutes or hours),
`# ray` (needs that extra), `# serves` (until it is stopped).
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

from outpace.checkpoints.load import ZOO_TOKENIZER, load_tokenizer
from outpace.cli.app import build_app
from outpace.cli.main import main
from outpace.cli.measure import parse_entry
from outpace.cli.options import parse_entries, parse_method
from outpace.methods import METHODS
from outpace.training import recipe
from outpace.training.data import Data, Examples
from shown import ROOT, blocks, is_right

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MARKED = {
    "hub": {
        "README: chat qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "README: generate qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "README: install torch",
        "chat: chat Dream-org/Dream-v0-Instruct-7B",
        "chat: chat Qwen/Qwen3-0.6B",
        "chat: chat qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "evaluation: -m outpace.evaluation.harness",
        "evaluation: evaluate Dream-org/Dream-v0-Base-7B",
        "evaluation: evaluate tiny-ar",
        "gpu: generate Qwen/Qwen3-8B",
        "laptop: generate qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "measurements: evaluate qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "models: generate Qwen/Qwen3.5-4B",
        "models: generate Dream-org/Dream-v0-Base-7B",
        "models: generate qwen2.5-0.5b-instruct-q8_0.gguf",
        "models: quantize qwen2.5-0.5b-instruct-q8_0.gguf",
        "scale: --nproc-per-node 2",
        "scale: generate Qwen/Qwen3-8B",
        "start: generate Dream-org/Dream-v0-Base-7B",
        "start: generate Dream-org/Dream-v0-Instruct-7B",
        "start: generate GSAI-ML/LLaDA-8B-Instruct",
        "start: generate Qwen/Qwen3-8B",
        "start: generate qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "start: generate tencent/WeDLM-8B-Instruct",
        "training: data Qwen/Qwen3-4B",
        "training: generate Qwen/Qwen3-4B",
        "benchmark: reproduce dflash",
        "training-coder: benchmark methods",
        "training-coder: data qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "training-coder: examples/code_prompts.py --package",
        "training-coder: generate qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "training-coder: train qwen2.5-coder-0.5b-dflash",
        "training-coder: train qwen2.5-coder-0.5b-eagle",
        "training-smollm2: data smollm2-135m-instruct-q4_1.gguf",
        "training-smollm2: examples/code_prompts.py --package",
        "training-smollm2: generate smollm2-135m-instruct-q4_1.gguf",
        "training-smollm2: quantize runs/smollm2-135m-dflash/best",
        "training-smollm2: reproduce dflash:table1",
        "training-smollm2: train smollm2-135m-dflash",
        "training-smollm2: train smollm2-135m-eagle",
        "training-published: train llada-8b-d2f",
        "training-published: train qwen2.5-0.5b-dream",
        "training-published: train qwen2.5-7b-wedlm",
        "training: train qwen3-4b-dflash",
    },
    "long": {
        "benchmark: benchmark methods",
        "benchmark: reproduce apd:figure3",
        "benchmark: reproduce wedlm",
        "benchmark: tune tiny-dream",
        "command-line: train tiny-aux",
        "methods-blocks: benchmark methods",
        "methods-feature-drafts: benchmark methods",
        "reproduced: reproduce apd",
        "results-diffusion: benchmark methods",
        "results: reproduce dflash:table1",
        "training: train tiny-ar",
        "training: train tiny-aux",
        "training-zoo: -m outpace.evaluation.generated.story",
        "training-zoo: -p runs/tiny-dflash",
        "training-zoo: evaluate runs/tiny-dream/export",
        "training-zoo: generate tiny-ar",
        "training-zoo: train tiny-ar",
        "training-zoo: train tiny-aux",
        "training-zoo: train tiny-aux-sudoku",
        "training-zoo: train tiny-d2f-noise",
        "training-zoo: train tiny-d2f",
        "training-zoo: train tiny-dflash",
        "training-zoo: train tiny-dream",
        "training-zoo: train tiny-dream-sudoku",
        "training-zoo: train tiny-eagle",
        "training-zoo: train tiny-llada",
        "training-zoo: train tiny-block",
        "training-zoo: train tiny-wedlm-wordings",
        "training-zoo: train tiny-wedlm",
    },
    "ray": {
        "scale: evaluate tiny-ar",
        "scale: generate tiny-ar",
    },
    "serves": {
        "README: serve",
        "capacity: benchmark serve",
        "load: benchmark serve",
        "load: serve",
        "models: serve Qwen/Qwen3-0.6B",
        "operating: serve --config",
        "scale: --nproc-per-node 2",
        "scale: serve Qwen/Qwen3-8B",
        "scale: serve tiny-ar",
        "server: serve",
        "server: serve --model",
        "server: serve tiny-dream",
    },
}
"""Commands that are not run, by their mark: page and first words. The server's are asked in
`tests/server/test_docs.py`."""

BRIEF = {
    "benchmark": ["--limit", "2", "--rounds", "2"],
    "evaluate": ["--limit", "2"],
    "race": ["--limit", "2"],
}
"""What is added to a command so that it ends soon."""

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")


def commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Lines of a page's shell blocks: the mark, and the words."""
    for block in blocks(path, "sh"):
        above = ""
        for line in block.splitlines():
            match = re.fullmatch(r"(.*?)\s*(?:# (\w+))?", line)
            assert match is not None
            code, mark = match.groups()
            assert mark is None or mark in MARKED, f"{path.name}: no mark {mark!r}: {line}"
            if code:
                yield mark or above, shlex.split(code)
            else:
                above = mark or ""


def headings(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def extras() -> set[str]:
    """Names of the extras of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


@page
def test_snippets_run(
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": path.stem}
    for block in blocks(path, "python"):
        exec(compile(block, path.name, "exec", dont_inherit=True), names)
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test()
    assert is_right("".join(blocks(path, "python")), capsys.readouterr().out)


def furnish(folder: Path) -> None:
    """What the commands of the pages read, beside what those before them write."""
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


LONG_PAGES = ("results-diffusion",)
"""Pages whose commands take minutes."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=pytest.mark.nightly if path.stem in LONG_PAGES else pytest.mark.nightly,
            id=path.stem,
        )
        for path in PAGES
        if any(not mark for mark, _ in commands(path))
    ],
)
def test_commands_run(
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("sys.stdin", io.StringIO("Tom has 3 apples and buys 4 more.\n"))
    for mark, (program, *words) in commands(path):
        if mark or program != "outpace":
            continue
        printed = told(words, capsys)
        if not any(word.endswith("?") for word in words):
            continue
        if words[0] == "trace":
            words = words[: words.index("--png")] if "--png" in words else words
            printed = told(["generate", *words[1:]], capsys)
        assert is_right(" ".join(words), printed), words


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints; it must succeed."""
    with pytest.raises(SystemExit) as ended:
        main([*words, *BRIEF.get(words[0], ())])
    shown = capsys.readouterr()
    assert not ended.value.code, (words, shown.err)
    return shown.out


def test_marked_commands_are_these() -> None:
    found: dict[str, set[str]] = {mark: set() for mark in MARKED}
    for path in PAGES:
        for mark, words in commands(path):
            if mark:
                found[mark].add(f"{path.stem}: {' '.join(words[1:3])}")
    assert found == MARKED


@page
def test_commands_are_accepted(path: Path) -> None:
    """Those that are not run too: every `outpace` has such a command, flags and method, every
    `make` such a target, every `pip` such an extra."""
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
                assert program in ("curl", "mkdir")


def check(words: list[str]) -> None:
    """Parse a command as it will be, down to its method, racers and recipe."""
    command: Any = build_app()
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    given = command.make_context(command.name, words).params
    for entry in given.get("entry") or ():
        parse_entry(entry)
    for entry in given.get("entries") or ():
        assert parse_entries(entry)
    if method := given.get("method"):
        fields = METHODS[method].__dataclass_fields__
        parse_method(method, {k: v for k, v in given.items() if k in fields and v is not None})
    if "recipe" in given:
        recipe.load_recipe(given["recipe"], given["overrides"] or ())


def test_extras_that_are_named_exist() -> None:
    texts = [path.read_text() for path in (*PAGES, *(ROOT / "src").rglob("*.py"))]
    named_extras = {name for text in texts for name in re.findall(r"outpace\[(\w+)\]", text)}
    assert named_extras and named_extras <= extras()


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
