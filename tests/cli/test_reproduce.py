"""`outpace reproduce` as typed by a user."""

import json
from weakref import WeakSet

import pytest

from outpace import LLM
from outpace.lab.reproduce import figure, memory

PNG = b"\x89PNG"
MODELS = ("target=tiny-ar", "dflash=tiny-dflash", "eagle=tiny-eagle")
SMALL = (
    *("dflash:table1", "--scale", "small"),
    *(word for model in MODELS for word in ("--model", model)),
)
PROBLEM = {"prompt": "def one():\n    ", "test": "def check(f): pass", "entry_point": "one"}
QUESTION = {"question": "What is 1 + 1?", "answer": "#### 2"}


@pytest.mark.nightly
def test_a_figure_is_redrawn_beside_the_published_points(outpace, tmp_path):
    words = ("reproduce", "wedlm:streaming", "--limit", 2, "--rounds", 1, "--out", tmp_path)
    status, out, err = outpace(*words)
    assert status == 0, err
    assert "2 story" in out
    written = json.loads((tmp_path / "wedlm-streaming-mini.json").read_text())
    assert len(written["results"]) == 12
    assert [claim["paper"] for claim in written["claims"]] == ["", "221 → 423"]
    text = (tmp_path / "figures.md").read_text()
    assert "| wedlm:streaming | mini | " in text and "streaming is faster at each" in text
    assert text.count("| tiny-wedlm wedlm window=16 block=") == 8
    assert (tmp_path / "wedlm-streaming-mini.png").read_bytes().startswith(PNG)
    folder = tmp_path / "samples" / "wedlm-streaming-mini"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(before) == 12
    assert outpace(*words)[0] == 0
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.nightly
def test_all_figures_are_measured_also_past_one_that_fails(outpace, tmp_path, monkeypatch):
    names = ("apd:coupling", "apd:prose", "wedlm:entropy")
    chosen = [each for name in names for each in figure.find(name)]
    monkeypatch.setattr(figure, "figures_at", lambda scale: chosen)
    (tmp_path / "apd-prose-mini.png").mkdir()  # cannot be replaced
    words = ("reproduce", "--all", "--limit", 1, "--rounds", 1, "--out", tmp_path)
    status, out, err = outpace(*words)
    assert status == 1 and "1 of 3 failed" in err and err.count("apd-prose-mini") >= 2, err
    assert (tmp_path / "wedlm-entropy-mini.json").is_file()
    before = {path: path.read_bytes() for path in (tmp_path / "samples").glob("*/*")}
    (tmp_path / "apd-prose-mini.png").rmdir()
    status, out, err = outpace(*words)
    assert status == 0, err
    after = {path: path.read_bytes() for path in (tmp_path / "samples").glob("*/*")}
    assert before.items() <= after.items() and (tmp_path / "apd-prose-mini.json").is_file()
    assert len({path.parent for path in after}) == 3


@pytest.mark.nightly
def test_lines_of_other_tasks_have_their_own_prompts(outpace, tmp_path):
    words = ("reproduce", "wedlm:tasks", "--limit", 2, "--rounds", 1, "--out", tmp_path)
    status, _, err = outpace(*words)
    assert status == 0, err
    results = json.loads((tmp_path / "wedlm-tasks-mini.json").read_text())["results"]
    tasks = [each["task"] for each in results]
    assert tasks == ["table", *["story"] * 3, "table", *["story"] * 3]
    assert len({(each["task"], each["questions"]) for each in results}) == 2


@pytest.mark.nightly
def test_a_small_scale_measures_its_tasks_with_given_models(outpace, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # cells are not wrapped
    files = {"humaneval": PROBLEM, "gsm8k": QUESTION, "prose": {"prompt": "Begin."}}
    data = []
    for task, line in files.items():
        (tmp_path / task).write_text(json.dumps(line) + "\n")
        data += ["--data", f"{task}={tmp_path / task}"]
    words = ("reproduce", *SMALL[:-2], *data, "--limit", 1, "--out", tmp_path)  # without EAGLE
    status, out, err = outpace(*words)
    assert status == 0, err
    printed = " ".join(out.split())
    assert "without a path of eagle" in printed
    assert all(f"1 {task}" in printed for task in files)
    for task in files:
        written = json.loads((tmp_path / f"dflash-table1-small-{task}.json").read_text())
        assert [each["task"] for each in written["results"]] == [task] * 5
        assert [each["equal"] for each in written["results"]] == [1.0] * 5
        claims = [each["claim"] for each in written["claims"]]
        assert claims == [
            "faster than the target alone",
            "more than 6 times as fast as the target alone",
            "with tokens = auto, faster than the target alone",
            "all texts equal those of the first line",
        ]
        papers = [each.get("paper") for each in written["results"]]
        assert [number for number, paper in enumerate(papers) if paper] == [1]
    text = (tmp_path / "figures.md").read_text()
    assert "| dflash:table1 | small, prose | " in text and "(paper 4.24)" in text


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("nobody",), "nobody"),
        (("apd:table9",), "apd:table1"),
        (("apd:table1", "--scale", "small"), "dflash:table1"),
        (("apd:table2", "--model", "target=x"), "scale"),
        ((*SMALL[:3],), "--model target=PATH"),
        ((*SMALL, "--model", "target=x"), "NAME=PATH"),
        ((*SMALL, "--data", "x"), "TASK=FILE"),
        ((*SMALL, "--data", "math500=x"), "prose"),
        ((*SMALL, "--data", "gsm8k="), "prose"),
        (SMALL, "HumanEval.jsonl.gz"),
        ((), "--list"),
        (("--all", "apd"), "--list"),
        (("--all", "--scale", "x"), "small"),
        (("apd:figure2", "--shots", "gsm8k=x"), "none"),
        (("d2f", "--scale", "full", "--shots", "x"), "gsm8k, mbpp"),
        (("apd:figure2", "--scale", "full"), "set it to"),
    ],
)
def test_invalid_words_are_named_in_one_line(refused, words, name, tmp_path):
    assert name in refused("reproduce", *words, "--out", tmp_path)


def test_costs_are_listed_and_models_that_do_not_fit_are_refused(
    outpace, refused, tmp_path, monkeypatch
):
    _, out, _ = outpace("reproduce", "dflash:table1", "--list")
    assert out.count("small") == 3 and "GiB" in out
    monkeypatch.setattr("outpace.engine.memory.available_bytes", lambda device: 2**33)
    data = tmp_path / "test.jsonl"
    data.write_text(json.dumps(QUESTION))
    words = ("dflash:table1", "--scale", "full", "--limit", 1, "--data", data)
    said = refused("reproduce", *words, "--dtype", "bfloat16")
    assert "Qwen/Qwen3-8B needs 28.1 GiB" in said and "8.0 are free" in said


@pytest.mark.nightly
def test_models_that_do_not_fit_together_are_measured_in_turn(outpace, tmp_path, monkeypatch):
    loaded = WeakSet()

    class Counted(LLM):
        def __init__(self, *args, **options):
            assert not loaded
            super().__init__(*args, **options)
            loaded.add(self)

    (tmp_path / "models.toml").write_text("tiny-ar = 1\ntiny-wedlm = 1")
    monkeypatch.setattr(memory, "SIZES", tmp_path / "models.toml")
    monkeypatch.setattr("outpace.engine.memory.available_bytes", lambda device: 7 * 2**30)
    monkeypatch.setattr("outpace.api.llm.LLM", Counted)
    words = ("wedlm:figure1", "--limit", 1, "--out", tmp_path)
    status, _, err = outpace("reproduce", *words)
    assert status == 0, err
    written = json.loads((tmp_path / "wedlm-figure1-mini.json").read_text())["results"]
    assert [each["line"].split()[0] for each in written] == ["tiny-ar", *["tiny-wedlm"] * 3]


@pytest.mark.nightly
def test_models_that_nobody_ships_are_trained_first(outpace, refused, tmp_path, monkeypatch):
    table = tmp_path / "trained.toml"
    names = ("draft", "draft-1-layer", "draft-3-layers", "draft-no-features", "draft-1-feature")
    words = "tiny-dflash data.path=story:train data.plain=true steps=2 batch=2 anchors=2"
    table.write_text("".join(f'{name} = "{words}"\n' for name in names))
    monkeypatch.setattr(figure, "TABLE", table)
    asked = ("dflash:depth", "--limit", 2, "--rounds", 1, "--out", tmp_path)
    status, out, err = outpace("reproduce", *asked)
    assert status == 0, err
    said = " ".join(out.split())
    assert "trained:draft-3-layers; 3 of" in said and "step 2/2" in said
    written = json.loads((tmp_path / "dflash-depth-mini.json").read_text())
    assert set(written["trained"].values()) == {words}
    for words in (asked, ("dflash:features", *asked[1:])):
        status, out, err = outpace("reproduce", *words)
        assert status == 0, err
        assert "trained:draft: outpace train" in out and "resuming after step 2" in out
    monkeypatch.setattr(figure, "TABLE", tmp_path / "other.toml")
    (tmp_path / "other.toml").write_text(table.read_text().replace("steps=2", "steps=2 lr=1e-3"))
    assert "lr" in refused("reproduce", *asked)
