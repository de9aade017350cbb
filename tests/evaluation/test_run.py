"""Evaluation runs: metrics, and resumption after an interruption."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, Output
from outpace.decoding import Step
from outpace.evaluation.question import Question
from outpace.evaluation.report import EvaluationReport
from outpace.evaluation.run import evaluate, limit_to_context, questions_of
from outpace.evaluation.samples import resume_samples
from outpace.methods import WeDLM


def output(tokens: int, forwards: int) -> Output:
    """An output of this many tokens and forwards of two models."""
    steps = [Step(role, 0, 1, 1, 0, 0.0) for role in ["target"] * forwards + ["verifier"] * 9]
    return Output(
        text="",
        ids=[0] * tokens,
        finish_reason="stop",
        steps=steps,
        prompt_tokens=3,
        seconds=2.0,
    )


def report(*verdicts: bool | None) -> EvaluationReport:
    """A run with answers of 30 and 10 tokens in 10 forwards each."""
    made = EvaluationReport(task="story", model="m", method="x", batch=1, seconds=4.0)
    for number, right in enumerate(verdicts):
        made.add_answer(output((30, 10)[number % 2], 10), right)
    return made


def test_headline_metrics_pool_all_answers() -> None:
    made = report(True, False)
    assert made.accuracy == 0.5
    assert made.standard_error == pytest.approx(math.sqrt(0.25 / 2))
    assert made.tokens_per_forward == 2.0
    assert made.tokens_per_second == 10.0


def test_unjudged_answers_have_only_speed() -> None:
    summary = report(None, None).to_record()
    assert summary["accuracy"] is None and summary["interval"] is None
    assert summary["tokens_per_forward"] == 2.0
    assert report(True, None, None).accuracy == 1.0


def test_report_is_json() -> None:
    summary = report(True).to_record()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["tokens_per_forward_error"] is None
    assert json.dumps(
        EvaluationReport(task="", model="", method="", batch=1).to_record(), allow_nan=False
    )
    placed = EvaluationReport(task="", model="/a/b/x.gguf + /c/lora", method="", batch=1)
    assert placed.to_record()["model"] == "x + lora"


def test_batch_size_changes_only_time() -> None:
    llm = LLM("tiny-aux")
    questions = questions_of("story", 6)
    one = evaluate(llm, questions, batch=1, max_tokens=96)
    many = evaluate(llm, questions, batch=6, max_tokens=96)
    assert [o.ids for o in one.outputs] == [o.ids for o in many.outputs]
    assert one.verdicts == many.verdicts


class Killed(Exception):
    """Exception that simulates a kill."""


def counted(report: EvaluationReport) -> dict[str, Any]:
    """Report fields that do not depend on the clock."""
    clock = ("tokens_per_second", "latency", "first_text", "seconds")
    summary = {key: value for key, value in report.to_record().items() if key not in clock}
    return {**summary, "samples": {**summary["samples"], "seconds": None}}


def test_resumed_run_has_the_same_metrics(tmp_path: Path) -> None:
    llm, questions = LLM("tiny-aux", "autoregressive"), questions_of("story", 6)
    options = {"task": "story", "batch": 2, "max_tokens": 64, "temperature": 0.7, "seed": 3}
    whole = evaluate(llm, questions, **options)  # type: ignore[arg-type]
    path = tmp_path / "new" / "samples.jsonl"

    def stop(report: EvaluationReport) -> None:
        if len(report.outputs) == 3:
            raise Killed

    with pytest.raises(Killed):
        evaluate(llm, questions, samples=path, progress=stop, **options)  # type: ignore[arg-type]
    lines = path.read_bytes()
    assert lines.count(b"\n") == 4
    path.write_bytes(lines[:-40])
    seen: list[int] = []
    resumed = evaluate(
        llm,
        questions,
        samples=path,
        progress=lambda report: seen.append(len(report.outputs)),
        **options,  # type: ignore[arg-type]
    )
    assert seen == [3, 4, 5, 6]
    assert counted(resumed) == counted(whole)
    assert path.read_bytes().count(b"\n") == 7

    again = evaluate(llm, questions, samples=path, **options)  # type: ignore[arg-type]
    assert counted(again) == counted(whole) and again.seconds == resumed.seconds


@pytest.mark.parametrize(
    ("changed", "expected_message"),
    [
        ({"seed": 4}, "options is .*'seed': 3"),
        ({"batch": 1}, "batch is 2, expected 1"),
        ({"task": "other"}, "task is 'story', expected 'other'"),
    ],
)
def test_other_runs_are_rejected(
    tmp_path: Path, changed: dict[str, Any], expected_message: str
) -> None:
    llm, questions = LLM("tiny-aux"), questions_of("story", 2)
    path = tmp_path / "samples.jsonl"
    options = {"task": "story", "batch": 2, "max_tokens": 16, "seed": 3}
    evaluate(llm, questions, samples=path, **options)  # type: ignore[arg-type]
    before = path.read_bytes()
    with pytest.raises(ValueError, match=expected_message):
        evaluate(llm, questions, samples=path, **{**options, **changed})
    with pytest.raises(ValueError, match="questions is"):
        evaluate(llm, questions[:1], samples=path, **options)  # type: ignore[arg-type]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("held", "expected_message"),
    [
        (b"notes of mine", "is not a file of answers"),
        (b"notes of mine\n", "samples.jsonl:1 is not JSON"),
        (b"{}\n", "schema is None, expected 1"),
    ],
)
def test_foreign_files_are_rejected(tmp_path: Path, held: bytes, expected_message: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(held)
    with pytest.raises(ValueError, match=expected_message):
        evaluate(LLM("tiny-aux"), questions_of("story", 1), samples=path, max_tokens=4)
    assert path.read_bytes() == held


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with (
        resume_samples(path, {"task": "x"}) as samples,
        pytest.raises(ValueError, match="another run is writing to"),
    ):
        samples.add_record(0, {"text": "x"})
        evaluate(LLM("tiny-aux"), questions_of("story", 1), samples=path, max_tokens=4)
    assert path.read_bytes().count(b"\n") == 2


def test_invalid_line_is_named(tmp_path: Path) -> None:
    path, llm = tmp_path / "samples.jsonl", LLM("tiny-aux")
    questions = questions_of("story", 1)
    evaluate(llm, questions, samples=path, max_tokens=4)
    path.write_bytes(path.read_bytes().replace(b'"ids"', b'"idz"'))
    with pytest.raises(ValueError, match="contains an invalid answer: KeyError"):
        evaluate(llm, questions, samples=path, max_tokens=4)


def test_empty_questions_are_rejected() -> None:
    with pytest.raises(ValueError, match="questions must not be empty"):
        evaluate(LLM("tiny-aux"), [])
    assert Question("?", "7", "strict").judge_answer("#### 7") is True


def test_held_out_problems_are_disjoint() -> None:
    seen = {question.prompt for question in questions_of("story", 50)}
    unseen = {question.prompt for question in questions_of("story-unseen", 50)}
    assert len(seen) > 45 and not seen & unseen


@pytest.mark.parametrize(
    ("task", "limit", "expected_message"),
    [
        ("nonsense", 5, "unknown task 'nonsense'; choose from countdown, gsm8k"),
        ("story", 0, "limit"),
    ],
)
def test_invalid_tasks_are_rejected(task: str, limit: int, expected_message: str) -> None:
    with pytest.raises(ValueError, match=expected_message):
        questions_of(task, limit)


def test_lengths_of_a_protocol_are_cut_to_the_context() -> None:
    llm = LLM("tiny-wedlm", max_length=300)
    questions = questions_of("story", 6)
    longest = max(len(llm.text.encode(question.prompt)) for question in questions)
    method = WeDLM(window=16)
    for asked, wanted in ((96, 96), (1024, 300 - method.slots_needed(longest, 0))):
        options = limit_to_context(llm, questions, {"max_tokens": asked, "method": method})
        assert options["max_tokens"] == wanted
        assert len(evaluate(llm, questions[:1], **options).outputs) == 1
