"""Every program in `benchmarks/` runs, as small as it can be."""

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from helpers import published, random_model
from outpace.checkpoints.hub import ZOO_FOLDER
from outpace.checkpoints.load import save_model

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text())
CLONES = [name for name in PROGRAMS if name.endswith("_official")]
CURVES = {"everyday": "everyday-servers", "methods": "methods", "orders": "orders"}
"""Programs that draw, each with stored results."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs a program with arguments, as the command line does."""

    def program(name: str, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])
        import_module(name).main()

    return program


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_can_be_imported_and_has_help(name: str, run) -> None:
    with pytest.raises(SystemExit) as end:
        run(name, "--help")
    assert end.value.code == 0


SMOKES = [
    ("adapters", "--rounds 1 --requests 2 --tokens 4"),
    ("attention", "--rounds 1 --shapes SmolLM2-135M"),
    ("constraints", "--rounds 1 --tokens 40 --batch 2 --methods autoregressive --vocabulary 1500"),
    ("dflash_curve", "--limit 2 --batch 1 2"),
    ("draft_turns", "--model tiny-ar --draft own=tiny-dflash --turns 0 1 --prompts 1 --tokens 8"),
    ("everyday", "--model tiny-ar --limit 1 --only prose"),
    ("everyday", "--model tiny-ar --limit 1 --only json --sides outpace --requests 2"),
    ("forward_cost", "--rounds 1 --tokens 4 --batch 2"),
    ("cpu", "--rounds 1 --shapes tiny --counts 1 --sides outpace transformers"),
    ("slots", "--rounds 1 --shape tiny --sides outpace transformers --requests 1 2"),
    ("gpu", "--cpu-smoke"),
    ("infilling", "--limit 1 --only tiny-wedlm"),
    ("host_time", "--rounds 1 --tokens 4 --batch 1 2"),
    ("load", "--streams 1 2 --requests 4 --warmup 1"),
    ("load", "--rate 20 --requests 4 --warmup 1"),
    ("methods", "--limit 1 --max-tokens 16"),
    ("quality", "--limit 2 --mixed 12 --max-tokens 12"),
    ("pace", "--rounds 1 --tokens 4 --batch 1 2 --only Speculative"),
    ("pace", "--rounds 1 --tokens 4 --prompts 2 --model tiny-ar --draft tiny-aux --fixed 2"),
    ("orders", "--limit 1 --max-tokens 32 --settings half,one,factor"),
    ("serve", "--rounds 1 --requests 4 --streams 4 --cuts 4 --seconds 1 --minutes 0.2"),
    ("wedlm_official", "--rounds 1 --tokens 8"),
]
GPU_TABLES = {
    *("card", "attention", "reads", "equality", "steps", "prefill", "cycles", "projected"),
    *("training", "paced", "zoo", "answers"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "words"), SMOKES)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_smallest_run_writes_its_tables(name: str, words: str, run, tmp_path: Path) -> None:
    picture = ["--png", str(tmp_path / "a.png")] if name in CURVES else []
    run(name, *words.split(), "--json", str(tmp_path / "new" / "a.json"), *picture)
    written = json.loads((tmp_path / "new" / "a.json").read_text())
    assert written.pop("provenance")["outpace"]
    assert all(bar["limit"] is not None for bar in written.pop("bars"))
    assert written and any(rows and rows[0] for rows in written.values())
    assert name != "gpu" or {title for title, rows in written.items() if rows} >= GPU_TABLES
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
    out, shape = tmp_path / "a.json", "from cpu import SHAPES, made\nimport llama, sys\n"
    code = f"{shape}from pathlib import Path\nroot = Path(sys.argv[1])\n"
    code += "llama.write(made(SHAPES['tiny'], root), 'q8_0', root / 'a.gguf')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=FOLDER)
    words = ("--rounds", "1", "--loads", "1", "--prompt", "64", "--json", str(out))
    run("cpu_files", str(tmp_path / "a.gguf"), *words)
    row = json.loads(out.read_text())["rows"][0]
    assert row["side"] == "outpace" and row["peak MB"] > 100
    assert all(row[name] > 0 for name in ("load s", "prompt ms", "1 rows ms", "32 rows ms"))


@pytest.mark.nightly
def test_real_text_goes_on_until_all_is_trained_and_measured(tmp_path: Path) -> None:
    config = published("LlamaForCausalLM", vocab_size=1024, max_position_embeddings=512)
    save_model(random_model(config), tmp_path / "model")
    shutil.copytree(ZOO_FOLDER / "vocabulary", tmp_path / "model", dirs_exist_ok=True)
    problem = {"prompt": "def one():\n", "test": "def check(f): pass", "entry_point": "one"}
    question = {"question": "What is 1 + 1?", "answer": "#### 2"}
    prompts = [{"prompt": f"What is {n} + 2?"} for n in range(60)]
    for name, lines in (("prompts", prompts), ("gsm8k", [question]), ("humaneval", [problem])):
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shutil.copytree(tmp_path / "model", tmp_path / "larger")
    given = "--target larger --small model --prompts prompts --gsm8k gsm8k --humaneval humaneval"
    small = "--folder out --limit 1 --change train.steps=2 --change held_out.examples=2"
    command = [sys.executable, FOLDER / "real_text.py", *f"{given} {small}".split(), "--seconds"]
    for seconds, status in (("6", 75), ("900", 0)):
        assert subprocess.run([*command, seconds], cwd=tmp_path).returncode == status
    assert (tmp_path / "out" / "stages.json").read_text().count('"complete": true') == 9
    files = {path.stem: path for path in (tmp_path / "out" / "figures").glob("*.json")}
    results = json.loads(files["apd-prose-small"].read_text())["results"]
    assert len(files) == 6 and all(each["likelihood"] < 0 for each in results)


def test_every_program_is_run() -> None:
    others = {"cache_dtypes", "cpu_files", "real_text", "tool_choice", "vocabulary"}
    assert sorted({name for name, _ in SMOKES} | set(CLONES) | others) == PROGRAMS


@pytest.mark.parametrize(("name", "results"), CURVES.items())
def test_stored_results_are_drawn(name: str, results: str, run, tmp_path: Path) -> None:
    stored = str(FOLDER / "results" / f"{results}.json")
    run(name, "--draw", stored, "--png", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", CLONES)
def test_a_missing_clone_is_named(name: str, run, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--official") as end:
        run(name, "--official", str(tmp_path / "nowhere"))
    assert end.value.code
