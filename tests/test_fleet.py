"""Copies of a model on Ray Data: every line once, whoever is killed, as one process has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM
from outpace.cli.main import main
from outpace.evaluation.answers import answer_file
from outpace.evaluation.generated.story import story_problems
from rayed import SECONDS, running

pytest.importorskip("ray.data", reason="needs the extra ray")

from outpace.ray.batches import Fleet, ModelCopy

COPY = "MapWorker"
OPTIONS = {"max_tokens": 24, "temperature": 0.8}
WORDS = ("--batch", "16", "--max-tokens", "24", "--temperature", "0.8", "--ray", "--replicas", "2")


def asked(path: Path, count: int) -> Path:
    """A file of so many prompts."""
    lines = (json.dumps({"prompt": each.question}) for each in story_problems("test", count))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file in the order of the prompts, each of which is there once at most."""
    held = path.read_text().rpartition("\n")[0].split("\n") if path.exists() else []
    found = sorted((json.loads(line) for line in held if line), key=lambda record: record["line"])
    assert len({record["line"] for record in found}) == len(found)
    return found


def in_one_process(source: Path, target: Path) -> list[dict[str, Any]]:
    """What the answers must be."""
    answer_file(LLM("tiny-aux", cache_gib=0.25), source, target, batch=64, **OPTIONS)
    return lines(target)


def test_a_copy_answers_as_the_model_does() -> None:
    arguments = {"loading": {"model": "tiny-aux", "cache_gib": 0.25}, "options": OPTIONS}
    copy = ModelCopy(**arguments, batch=2, threads=None)
    questions = [each.question for each in story_problems("test", 3)]
    expected = [copy.llm.generate(q, seed=7 + n, **OPTIONS)[0] for n, q in enumerate(questions)]
    block = [(n, question, 7 + n) for n, question in enumerate(questions)]
    for more, refused in (([], []), ([(9, "too long " * 2000, 0)], [9])):
        row = copy({"block": [json.dumps(block + more)]})
        answers = dict(json.loads(row["answers"][0]))
        assert all(record["ids"] == expected[n].ids for n, record in answers.items())
        assert len(answers) == 3 or more
        assert [json.loads(each)[0] for each in row["refused"] if each] == refused


@pytest.mark.parametrize(
    ("model", "loading", "named"),
    [
        ("nowhere", {}, "nowhere"),
        ("tiny-ar", {"replicas": 0}, "replicas must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_copied_is_refused(model: str, loading: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Fleet(model, **loading)


@pytest.mark.nightly
def test_every_line_is_answered_once_though_a_copy_is_killed(tmp_path: Path) -> None:
    source, target = asked(tmp_path / "prompts.jsonl", 1000), tmp_path / "answers.jsonl"
    words = ("generate", "tiny-aux", "--input", str(source), "--output", str(target), *WORDS)
    with running(*words) as program:
        program.until(lambda: len(lines(target)) > 0)
        assert len(program.actors(COPY)) == 2
        program.kill_one(COPY)
        assert len(lines(target)) < 900
        assert program.process.wait(SECONDS) == 0, program.told()
    found = lines(target)
    assert len(found) == 1000
    assert found == in_one_process(source, tmp_path / "expected.jsonl")


@pytest.mark.nightly
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    source, target = asked(tmp_path / "prompts.jsonl", 300), tmp_path / "answers.jsonl"
    words = ("generate", "tiny-aux", "--input", str(source), "--output", str(target), *WORDS)
    with running(*words) as program:
        program.until(lambda: len(lines(target)) > 0)
        program.process.kill()
    before = len(lines(target))
    assert 0 < before < 300
    with source.open("a") as file:
        file.write(json.dumps({"prompt": "too long " * 2000}) + "\n")
    with running(*words) as program:
        assert program.process.wait(SECONDS) == 2
        assert f"{source}:301: " in program.told()
    asked(source, 300)
    with running(*words) as program:
        assert program.process.wait(SECONDS) == 0, program.told()
    assert lines(target) == in_one_process(source, tmp_path / "expected.jsonl")


@pytest.mark.nightly
def test_evaluation_is_that_of_one_process(tmp_path: Path) -> None:
    words = ("evaluate", "tiny-wedlm", "--limit", "30", "--batch", "8")
    kept = ("--samples", str(tmp_path / "samples.jsonl"))
    with running(*words, "--json", str(tmp_path / "many.json"), *kept, "--ray") as program:
        assert program.process.wait(SECONDS) == 0, program.told()
    for name, more in (("one", ()), ("again", kept)):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--json", str(tmp_path / f"{name}.json"), *more])
        assert not ended.value.code
    many, one, again = (judged(tmp_path, name) for name in ("many", "one", "again"))
    assert many == one == again and len(one) == 30


def judged(folder: Path, name: str) -> list[Any]:
    """The answers beside the figures of a run."""
    (path,) = folder.glob(f"{name}*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
