"""What is counted in an evaluation, and how an answer is judged."""

import math

import pytest

from outpace import LLM, Output
from outpace.decoding import Step
from outpace.evaluation.run import Report, evaluate, questions_of
from outpace.evaluation.tasks.question import Exact, Question


def output(tokens, forwards):
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


def test_headline_metrics_pool_all_answers():
    report = Report(task="story", model="m", method="x", batch=1, seconds=4.0)
    report.add(output(30, 10), True)
    report.add(output(10, 10), False)
    assert report.accuracy == 0.5
    assert report.standard_error == pytest.approx(math.sqrt(0.25 / 2))
    assert report.tokens_per_forward == 2.0
    assert report.tokens_per_second == 10.0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("so 7.\n#### 1,234", True),
        ("#### 1234\n#### 5", True),
        ("#### 5\n#### 1234", False),
        ("1234", False),
        ("#### 1234.", True),
        ("#### -1234", False),
    ],
)
def test_gsm8ks_rule(answer, right):
    assert Question("?", "1234").right(answer) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [("1 2 3", True), (" 1 2 3\n", True), ("1 2", False), ("1 2 3 4", False), ("1  2 3", False)],
)
def test_tables_are_scored_to_the_letter(answer, right):
    assert Exact("Count from 1 to 3.", "1 2 3").right(answer) is right
    questions = questions_of("table", 20)
    assert all(question.right(question.final) for question in questions)
    with pytest.raises(ValueError, match="generated; they are not read from 'x'"):
        questions_of("table", 1, "x")


def test_batches_change_nothing_but_the_time():
    llm = LLM("tiny-aux")
    questions = questions_of("story", 6)
    one = evaluate(llm, questions, batch=1, max_tokens=96)
    many = evaluate(llm, questions, batch=6, max_tokens=96)
    by_length = [sorted(len(o.ids) for o in report.outputs) for report in (one, many)]
    assert one.correct == many.correct and by_length[0] == by_length[1]


def test_problems_held_out_are_not_those_of_training():
    seen = {question.prompt for question in questions_of("story", 50)}
    unseen = {question.prompt for question in questions_of("story-unseen", 50)}
    assert len(seen) > 45 and not seen & unseen


@pytest.mark.parametrize(("task", "limit"), [("nonsense", 5), ("story", 0)])
def test_bad_tasks_are_refused(task, limit):
    with pytest.raises(ValueError, match="story|limit"):
        questions_of(task, limit)
