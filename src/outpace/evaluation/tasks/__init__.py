"""What a model can be evaluated on, by name; written by hand."""

from collections.abc import Callable
from functools import partial

from outpace.evaluation.tasks.gsm8k import gsm8k
from outpace.evaluation.tasks.question import Question
from outpace.evaluation.tasks.story import story
from outpace.evaluation.tasks.table import table

TASKS: dict[str, Callable[[int, str | None], list[Question]]] = {
    "gsm8k": gsm8k,
    "story": partial(story, "test"),
    "story-unseen": partial(story, "unseen"),
    "table": table,
}

__all__ = ["TASKS", "Question"]
