"""The draft of the zoo helps its target."""

from outpace import LLM
from outpace.evaluation.generated.story import story_problems
from outpace.methods import Autoregressive, DFlash


def test_the_draft_of_the_zoo_gives_the_same_text_in_a_fraction_of_the_passes() -> None:
    stories = [problem.question for problem in story_problems("test", 12)]
    llm = LLM("tiny-ar", max_length=256)
    plain = llm.generate(stories, method=Autoregressive(), max_tokens=128)
    method = DFlash(draft="tiny-dflash", tokens=15)
    fast = llm.generate(stories, method=method, max_tokens=128)
    assert [output.text for output in fast] == [output.text for output in plain]
    kept = [step.kept for output in fast for step in output.steps if step.model == "target"]
    verified = sum(output.forwards - 1 for output in fast)
    assert (sum(kept) - len(fast)) / verified > 8
