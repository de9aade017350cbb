"""What is counted in an evaluation, and how a run that was killed goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from outpace import LLM, Output
from outpace.decoding import Step
from outpace.evaluation.question import Question
from outpace.evaluation.report import Report
from outpace.evaluation.run import evaluate, fitted, questions_of
from outpace.evaluation.samples import kept
from outpace.methods import WeDLM


def output(tokens: int, forwards: int) -> Output:
    """An answer of so many tokens, made in so many forwards of two models."""
    steps = [Step(role, 0, 1, 1, 0, 0.0) for role in ["target"] * forwards + ["verifier"] * 9]
    return Output(
        text="",
        ids=[0] * tokens,
        finish_reason="stop",
        steps=steps,
        prompt_tokens=3,
        seconds=2.0,
    )


def report(*verdicts: bool | None) -> Report:
    """A run in which answers of 30 and of 10 tokens came in 10 forwards each, in turns."""
    made = Report(task="story", model="m", method="x", batch=1, seconds=4.0)
    for number, right in enumerate(verdicts):
        made.add(output((30, 10)[number % 2], 10), right)
    return made


def test_headline_metrics_pool_all_answers() -> None:
    """Long answers weigh more."""
    made = report(True, False)
    assert made.accuracy == 0.5
    assert made.standard_error == pytest.approx(math.sqrt(0.25 / 2))
    assert made.tokens_per_forward == 2.0
    assert made.tokens_per_second == 10.0


def test_what_nobody_judges_counts_for_speed_alone() -> None:
    """And has no accuracy."""
    summary = report(None, None).summary()
    assert summary["accuracy"] is None and summary["interval"] is None
    assert summary["tokens_per_forward"] == 2.0
    assert report(True, None, None).accuracy == 1.0


def test_a_report_is_json() -> None:
    """Also of a single answer, which has no error."""
    summary = report(True).summary()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["tokens_per_forward_error"] is None
    assert json.dumps(Report(task="", model="", method="", batch=1).summary(), allow_nan=False)
    placed = Report(task="", model="/a/b/x.gguf + /c/lora", method="", batch=1)
    assert placed.summary()["model"] == "x + lora"


def test_batches_change_nothing_but_the_time() -> None:
    """Answers stand in the order of their questions."""
    llm = LLM("tiny-aux")
    questions = questions_of("story", 6)
    one = evaluate(llm, questions, batch=1, max_tokens=96)
    many = evaluate(llm, questions, batch=6, max_tokens=96)
    assert [o.ids for o in one.outputs] == [o.ids for o in many.outputs]
    assert one.verdicts == many.verdicts


class Killed(Exception):
    """What stands for a kill here."""


def counted(report: Report) -> dict[str, Any]:
    """What does not depend on the clock."""
    clock = ("tokens_per_second", "latency", "first_text", "seconds")
    summary = {key: value for key, value in report.summary().items() if key not in clock}
    return {**summary, "samples": {**summary["samples"], "seconds": None}}


def test_a_killed_run_ends_with_the_same_numbers(tmp_path: Path) -> None:
    """Whether it was killed between two answers or in the middle of a line."""
    llm, questions = LLM("tiny-aux"), questions_of("story", 6)
    options = {"task": "story", "batch": 2, "max_tokens": 64, "temperature": 0.7, "seed": 3}
    whole = evaluate(llm, questions, **options)  # type: ignore[arg-type]
    path = tmp_path / "new" / "samples.jsonl"

    def stop(report: Report) -> None:
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
    ("changed", "says"),
    [
        ({"seed": 4}, "its options is .*'seed': 3"),
        ({"batch": 1}, "its batch is 2, not 1"),
        ({"task": "other"}, "its task is 'story', not 'other'"),
    ],
)
def test_answers_of_another_run_are_not_taken(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    """The file stays as it is."""
    llm, questions = LLM("tiny-aux"), questions_of("story", 2)
    path = tmp_path / "samples.jsonl"
    options = {"task": "story", "batch": 2, "max_tokens": 16, "seed": 3}
    evaluate(llm, questions, samples=path, **options)  # type: ignore[arg-type]
    before = path.read_bytes()
    with pytest.raises(ValueError, match=says):
        evaluate(llm, questions, samples=path, **{**options, **changed})
    with pytest.raises(ValueError, match="its questions is"):
        evaluate(llm, questions[:1], samples=path, **options)  # type: ignore[arg-type]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (b"notes of mine", "something else than answers"),
        (b"notes of mine\n", "samples.jsonl:1 is not JSON"),
        (b"{}\n", "its schema is None, not 1"),
    ],
)
def test_foreign_files_are_left_alone(tmp_path: Path, held: bytes, says: str) -> None:
    """Whatever they hold."""
    path = tmp_path / "samples.jsonl"
    path.write_bytes(held)
    with pytest.raises(ValueError, match=says):
        evaluate(LLM("tiny-aux"), questions_of("story", 1), samples=path, max_tokens=4)
    assert path.read_bytes() == held


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    """The second is refused before it has answered anything."""
    path = tmp_path / "samples.jsonl"
    with (
        kept(path, {"task": "x"}) as samples,
        pytest.raises(ValueError, match="another run is writing to"),
    ):
        samples.add(0, {"text": "x"})
        evaluate(LLM("tiny-aux"), questions_of("story", 1), samples=path, max_tokens=4)
    assert path.read_bytes().count(b"\n") == 2


def test_a_line_that_is_no_answer_is_named(tmp_path: Path) -> None:
    """Such as one that somebody has edited."""
    path, llm = tmp_path / "samples.jsonl", LLM("tiny-aux")
    questions = questions_of("story", 1)
    evaluate(llm, questions, samples=path, max_tokens=4)
    path.write_bytes(path.read_bytes().replace(b'"ids"', b'"idz"'))
    with pytest.raises(ValueError, match="holds a line that is no answer: KeyError"):
        evaluate(llm, questions, samples=path, max_tokens=4)


def test_a_question_without_a_rule_is_refused() -> None:
    """Before any work there is none to lose."""
    with pytest.raises(ValueError, match="no question"):
        evaluate(LLM("tiny-aux"), [])
    assert Question("?", "7", "strict").right("#### 7") is True


def test_problems_held_out_are_not_those_of_training() -> None:
    """Nor of one another."""
    seen = {question.prompt for question in questions_of("story", 50)}
    unseen = {question.prompt for question in questions_of("story-unseen", 50)}
    assert len(seen) > 45 and not seen & unseen


@pytest.mark.parametrize(
    ("task", "limit", "says"),
    [("nonsense", 5, "unknown task 'nonsense'; known are countdown, gsm8k"), ("story", 0, "limit")],
)
def test_bad_tasks_are_refused(task: str, limit: int, says: str) -> None:
    """With what is known."""
    with pytest.raises(ValueError, match=says):
        questions_of(task, limit)


def test_lengths_of_a_protocol_are_cut_to_the_context() -> None:
    """By the longest prompt and what the method needs besides; what fits stays."""
    llm = LLM("tiny-wedlm", max_length=300)
    questions = questions_of("story", 6)
    longest = max(len(llm.text.encode(question.prompt)) for question in questions)
    method = WeDLM(window=16)
    for asked, wanted in ((96, 96), (1024, 300 - method.slots(longest, 0))):
        options = fitted(llm, questions, {"max_tokens": asked, "method": method})
        assert options["max_tokens"] == wanted
        assert len(evaluate(llm, questions[:1], **options).outputs) == 1
