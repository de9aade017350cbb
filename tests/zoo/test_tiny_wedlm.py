"""The model of the zoo that fills masks under causal attention does so, and says what it means."""

import pytest

from outpace import LLM
from outpace.evaluation.run import evaluate, questions_of
from outpace.methods import Autoregressive, WeDLM


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With the method of its family."""
    return LLM("tiny-wedlm", max_length=256)


@pytest.mark.parametrize("task", ["story", "table"])
def test_it_solves_problems_in_few_forwards(llm: LLM, task: str) -> None:
    method = WeDLM(entropy=0.2, penalty=0.0)
    options = {"max_tokens": 128, "temperature": 0.0}
    report = evaluate(llm, questions_of(task, 30), task=task, batch=30, method=method, **options)
    assert report.accuracy >= 0.8
    assert report.tokens_per_forward > 5


def test_verified_text_is_that_of_its_own_next_tokens(llm: LLM) -> None:
    stories = [question.prompt for question in questions_of("story", 12)]
    plain = llm.generate(stories, method=Autoregressive(), max_tokens=128)
    fast = llm.generate(stories, method=WeDLM(verify=True), max_tokens=128)
    assert [output.ids for output in fast] == [output.ids for output in plain]
    forwards = [sum(output.forwards for output in outputs) for outputs in (plain, fast)]
    assert forwards[0] > 5 * forwards[1]
