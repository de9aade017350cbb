"""The zoo's own problems: grade-school stories made by seed. They are not GSM8K."""

from __future__ import annotations

from outpace.evaluation.tasks.question import Question
from outpace.zoo.story import problems


def story(split: str, limit: int, path: str | None) -> list[Question]:
    """Held-out problems: of templates seen in training (`test`) or of others (`unseen`)."""
    if path is not None:
        raise ValueError(f"story problems are generated; they are not read from {path!r}")
    return [Question(problem.question, problem.final) for problem in problems(split, limit)]
