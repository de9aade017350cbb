"""The draft of the zoo that extends features helps its target."""

import pytest

from outpace import LLM
from outpace.evaluation.generated.story import story_problems
from outpace.methods import Autoregressive, Eagle


@pytest.mark.parametrize(
    ("method", "least"),
    [
        (Eagle(draft="tiny-eagle", width=1), 4.0),
        (Eagle(draft="tiny-eagle", nodes=16), 4.0),
    ],
    ids=["chain", "tree"],
)
def test_the_draft_of_the_zoo_gives_the_same_text_in_a_fraction_of_the_passes(
    method: Eagle, least: float
) -> None:
    stories = [problem.question for problem in story_problems("test", 6)]
    llm = LLM("tiny-ar", max_length=256)
    plain = llm.generate(stories, method=Autoregressive(), max_tokens=100)
    fast = llm.generate(stories, method=method, max_tokens=100)
    assert [output.text for output in fast] == [output.text for output in plain]
    kept = [step.kept for output in fast for step in output.steps if step.model == "target"]
    verified = sum(output.forwards - 1 for output in fast)
    assert (sum(kept) - len(fast)) / verified > least
