"""Accuracy, tokens per forward and tokens per second of a method on a task, from one run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack

from outpace.evaluation.tasks import TASKS, Question
from outpace.llm import LLM
from outpace.options import Options
from outpace.output import Output


@dataclass(slots=True, kw_only=True)
class Report:
    """Headline metrics of one run; only visible output tokens count, never prompt or warm-up.

    `forwards` are passes of the target model, `seconds` is wall time of the whole run.
    """

    task: str
    model: str
    method: str
    batch: int
    outputs: list[Output] = field(default_factory=list, repr=False)
    correct: int = 0
    seconds: float = 0.0

    def add(self, output: Output, right: bool) -> None:
        """Count one answer."""
        self.outputs.append(output)
        self.correct += right

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.correct / max(len(self.outputs), 1)

    @property
    def standard_error(self) -> float:
        """Standard error of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(len(self.outputs), 1))

    @property
    def tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(output.ids) for output in self.outputs)

    @property
    def tokens_per_forward(self) -> float:
        """All output tokens over all forwards of the target."""
        return self.tokens / max(sum(output.forwards for output in self.outputs), 1)

    @property
    def tokens_per_second(self) -> float:
        """All output tokens over the wall time of the run."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """The figures as they are written to JSON."""
        count = max(len(self.outputs), 1)
        return {
            "task": self.task,
            "model": self.model,
            "method": self.method,
            "batch": self.batch,
            "problems": len(self.outputs),
            "accuracy": round(self.accuracy, 4),
            "standard_error": round(self.standard_error, 4),
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "tokens_per_answer": round(self.tokens / count, 1),
            "unfinished": sum(output.finish_reason == "length" for output in self.outputs),
            "seconds": round(self.seconds, 2),
        }


def questions_of(task: str, limit: int, path: str | None = None) -> list[Question]:
    """Questions of a task by name; `ValueError` for an unknown one."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known are {', '.join(TASKS)}")
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    return TASKS[task](limit, path)


def evaluate(
    llm: LLM,
    questions: list[Question],
    *,
    task: str = "",
    batch: int = 1,
    progress: Callable[[Report], None] = lambda report: None,
    **options: Unpack[Options],
) -> Report:
    """Answer all questions, `batch` at a time, and score them.

    `progress` is called after each answer. One answer runs first without being counted. Raises
    `ValueError` where there is no question, or no room for one.
    """
    if not questions:
        raise ValueError("there is no question to evaluate on")
    method = options.get("method") or llm.method
    report = Report(task=task, model=llm.name, method=repr(method), batch=batch)
    answers = llm.serve(((question.prompt, options) for question in questions), batch=batch)
    llm.generate(questions[0].prompt, **options)
    began = time.perf_counter()
    for number, output in answers:
        report.seconds = time.perf_counter() - began
        report.add(output, questions[number].right(output.text))
        progress(report)
    return report
