"""Every program in `benchmarks/` runs, as small as it can be."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text())
CLONES = [name for name in PROGRAMS if name.endswith("_official")]
CURVES = {
    "everyday": "everyday",
    "methods": "methods",
    "orders": "orders",
}
"""Programs that draw, and the results from which they do."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs a program with arguments, as the command line does."""

    def program(name: str, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])
        import_module(name).main()

    return program


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_shows_what_is_measured(name: str, run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(name, "--help")
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    assert end.value.code == 0 and text is not None
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_every_option_says_what_it_is(name: str) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    assert all(any(given.arg == "help" for given in call.keywords) for call in calls)


SMOKES = [
    ("adapters", "--rounds 1 --requests 2 --tokens 4"),
    ("constraints", "--rounds 1 --tokens 40 --batch 2 --methods autoregressive --vocabulary 1500"),
    ("dflash_curve", "--limit 2 --batch 1 2"),
    ("everyday", "--model tiny-ar --limit 1 --only prose"),
    ("everyday", "--model tiny-ar --limit 1 --only json --sides outpace --requests 2"),
    ("forward_cost", "--rounds 1 --tokens 4 --batch 2"),
    ("cpu", "--rounds 1 --shapes tiny --counts 1 --sides outpace transformers"),
    ("slots", "--rounds 1 --shape tiny --sides outpace transformers --requests 1 2"),
    ("gpu", "--cpu-smoke"),
    ("infilling", "--limit 1 --only tiny-wedlm"),
    ("host_time", "--rounds 1 --tokens 4 --batch 1 2"),
    ("methods", "--limit 1 --max-tokens 16"),
    ("quality", "--limit 2 --mixed 12 --max-tokens 12"),
    ("pace", "--rounds 1 --tokens 4 --batch 1 2 --only Speculative"),
    ("pace", "--rounds 1 --tokens 4 --prompts 2 --model tiny-ar --draft tiny-aux --fixed 2"),
    ("orders", "--limit 1 --max-tokens 32 --settings half,one,factor"),
    (
        "serve",
        "--rounds 1 --requests 4 --streams 4 --cuts 4 --seconds 1 --minutes 0.2",
    ),
    ("wedlm_official", "--rounds 1 --tokens 8"),
]
TABLES = {
    "gpu": {
        *("card", "attention", "reads", "equality", "steps", "prefill", "cycles", "projected"),
        *("training", "paced", "zoo", "answers"),
    },
}
"""Those of which none may be empty."""
LONG = ("cpu", "forward_cost", "gpu", "quality", "serve", "wedlm_official")
"""Those that take a minute."""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            name,
            words,
            id=name,
            marks=pytest.mark.nightly if name in LONG else pytest.mark.nightly,
        )
        for name, words in SMOKES
    ],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_smallest_run_writes_its_tables(name: str, words: str, run, tmp_path: Path) -> None:
    picture = ["--png", str(tmp_path / "a.png")] if name in CURVES else []
    run(name, *words.split(), "--json", str(tmp_path / "new" / "a.json"), *picture)
    written = json.loads((tmp_path / "new" / "a.json").read_text())
    assert written.pop("provenance")["outpace"]
    assert all(bar["limit"] is not None for bar in written.pop("bars"))
    assert written and any(rows and rows[0] for rows in written.values())
    assert TABLES.get(name, set()) <= {title for title, rows in written.items() if rows}
    assert bool(picture) == (tmp_path / "a.png").exists()


@pytest.mark.nightly
def test_a_training_run_is_judged(run, tmp_path: Path) -> None:
    draft, out, picture = (tmp_path / name for name in ("run", "a.json", "a.png"))
    words = ["train", "tiny-dflash", "steps=1", "batch=2", "path=story:train", f"out={draft}"]
    subprocess.run([sys.executable, "-m", "outpace", *map(str, words)], check=True)
    words = ["--limit", 1, "--batch", 1, "--run", f"short={draft}", "--json", out, "--png", picture]
    run("dflash_curve", *map(str, words))
    (row,) = json.loads(out.read_text())["training"]
    assert (row["run"], row["steps"]) == ("short", 1)
    assert 0.9 < row["acceptance length"] < 2  # it has learnt next to nothing
    assert picture.exists()


@pytest.mark.nightly
def test_files_are_measured(run, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    out, shape = tmp_path / "a.json", "from cpu import SHAPES, made\nimport llama, sys\n"
    code = f"{shape}from pathlib import Path\nroot = Path(sys.argv[1])\n"
    code += "llama.write(made(SHAPES['tiny'], root), 'q8_0', root / 'a.gguf')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=FOLDER)
    words = ("--rounds", "1", "--loads", "1", "--prompt", "64", "--json", str(out))
    run("cpu_files", str(tmp_path / "a.gguf"), *words)
    row = json.loads(out.read_text())["rows"][0]
    assert row["side"] == "outpace" and row["peak MB"] > 100
    assert all(row[name] > 0 for name in ("load s", "prompt ms", "1 rows ms", "32 rows ms"))


def test_every_program_is_tried() -> None:
    alone = {"cpu_files", "tool_choice"}
    assert sorted({name for name, _ in SMOKES} | set(CLONES) | alone) == PROGRAMS
    assert {name for name in PROGRAMS if name in CURVES} == set(CURVES)


@pytest.mark.parametrize(("name", "results"), CURVES.items())
def test_stored_results_are_drawn(name: str, results: str, run, tmp_path: Path) -> None:
    run(
        name,
        "--draw",
        str(FOLDER / "results" / f"{results}.json"),
        "--png",
        str(tmp_path / "a.png"),
    )
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", CLONES)
def test_missing_clone_is_said_in_one_line(name: str, run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        run(name, "--official", str(tmp_path / "nowhere"))
    message = str(end.value)
    assert "nowhere" in message and "--official takes a clone of" in message
    assert "\n" not in message
