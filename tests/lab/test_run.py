"""Evaluation runs: metrics, and resumption after an interruption."""

import math
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, Output
from outpace.decoding import Step
from outpace.lab.report import EvaluationReport
from outpace.lab.run import evaluate, questions_of
from outpace.lab.samples import resume_samples


def test_headline_metrics_pool_all_answers() -> None:
    made = EvaluationReport(task="story", model="m", method="x", batch=1, seconds=4.0)
    steps = [Step(role, 0, 1, 1, 0, 0.0) for role in ["target"] * 10 + ["verifier"] * 9]
    fields: dict[str, Any] = {"text": "", "finish_reason": "stop", "steps": steps}
    for tokens, right in ((30, True), (10, False)):
        output = Output(ids=[0] * tokens, prompt_tokens=3, seconds=2.0, **fields)
        made.add_answer(output, right)
    assert (made.accuracy, made.tokens_per_forward, made.tokens_per_second) == (0.5, 2.0, 10.0)
    assert made.standard_error == pytest.approx(math.sqrt(0.25 / 2))


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Load a model that generates one token at a time."""
    return LLM("tiny-aux", "autoregressive")


class Killed(Exception):
    """Exception that simulates a kill."""


def counted(report: EvaluationReport) -> dict[str, Any]:
    """Report fields that do not depend on the clock."""
    clock = ("tokens_per_second", "latency", "first_text", "seconds")
    summary = {key: value for key, value in report.to_record().items() if key not in clock}
    return {**summary, "samples": {**summary["samples"], "seconds": None}}


def test_resumed_run_has_the_same_metrics(tmp_path: Path, llm: LLM) -> None:
    questions = questions_of("story", 6)
    options: dict[str, Any] = {"task": "story", "batch": 2, "max_tokens": 32}
    options |= {"temperature": 0.7, "seed": 3}
    whole = evaluate(llm, questions, **options)
    path = tmp_path / "new" / "samples.jsonl"

    def stop(report: EvaluationReport) -> None:
        if len(report.outputs) == 3:
            raise Killed

    with pytest.raises(Killed):
        evaluate(llm, questions, samples=path, progress=stop, **options)
    lines = path.read_bytes()
    assert lines.count(b"\n") == 4
    path.write_bytes(lines[:-40])
    seen: list[int] = []
    options["progress"] = lambda report: seen.append(len(report.outputs))
    resumed = evaluate(llm, questions, samples=path, **options)
    assert seen == [3, 4, 5, 6]
    assert counted(resumed) == counted(whole)
    assert path.read_bytes().count(b"\n") == 7

    again = evaluate(llm, questions, samples=path, **options)
    assert counted(again) == counted(whole) and again.seconds == resumed.seconds


def test_other_runs_are_rejected(tmp_path: Path, llm: LLM) -> None:
    questions, path = questions_of("story", 2), tmp_path / "samples.jsonl"
    options: dict[str, Any] = {"task": "story", "batch": 2, "max_tokens": 16, "seed": 3}
    evaluate(llm, questions, samples=path, **options)
    before = path.read_bytes()
    for name, changed in (
        ("options", {"seed": 4}),
        ("batch", {"batch": 1}),
        ("task", {"task": "other"}),
    ):
        with pytest.raises(ValueError, match=f"{name} is"):
            evaluate(llm, questions, samples=path, **{**options, **changed})
    with pytest.raises(ValueError, match="questions is"):
        evaluate(llm, questions[:1], samples=path, **options)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"notes of mine", b"notes of mine\n", b"{}\n"])
def test_other_files_are_rejected(tmp_path: Path, llm: LLM, content: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="samples.jsonl"):
        evaluate(llm, questions_of("story", 1), samples=path, max_tokens=4)
    assert path.read_bytes() == content


def test_two_runs_do_not_write_to_one_file(tmp_path: Path, llm: LLM) -> None:
    path = tmp_path / "samples.jsonl"
    with (
        resume_samples(path, {"task": "x"}) as samples,
        pytest.raises(ValueError, match="samples.jsonl"),
    ):
        samples.add_record(0, {"text": "x"})
        evaluate(llm, questions_of("story", 1), samples=path, max_tokens=4)
    assert path.read_bytes().count(b"\n") == 2
