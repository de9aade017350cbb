"""Accuracy against speed of many settings on the same held-out problems, all in one run.

All settings solve a few problems in turn before the next ones are, in alternating order, so that a
slow minute of the machine falls on all of them alike, and a run that ends early has solved the same
problems with each. Greedy, on the CPU. Tokens per second are of CPU time, on one thread: what the
wall clock shows where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from rich.progress import track

import harness
from harness import Bar, Row, Timing
from outpace import LLM
from outpace.lab.metrics import count_fed_rows
from outpace.lab.protocol import Question
from outpace.lab.run import questions_of
from outpace.methods import Method

matplotlib.use("Agg")

Summary = tuple[dict[str, list[Row]], list[Bar]]
"""Tables, of which `results` has a row for each setting, and bars."""

HIDDEN = ("task", "problems", "tokens_per_wall_second", "tokens_per_answer", "method")
"""Columns that are written and not shown."""


@dataclass(slots=True)
class Point:
    """One setting on one task, and what it has come to.

    `kind` names the line that it belongs to, `setting` its place there.
    """

    kind: str
    setting: str
    model: str
    method: Method
    task: str = "story"
    right: list[bool] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    fed: int = 0
    timings: list[Timing] = field(default_factory=list)

    def solve(self, llm: LLM, questions: Sequence[Question], max_tokens: int) -> None:
        """Answer some questions together, and count them."""
        prompts = [question.prompt for question in questions]
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, method=self.method, max_tokens=max_tokens, temperature=0.0)
        self.timings.append(Timing(time.process_time() - cpu, time.perf_counter() - wall))
        for question, output in zip(questions, outputs, strict=True):
            self.right.append(bool(question.judge_answer(output.text)))
            self.tokens += len(output.ids)
            self.forwards += output.forwards
            self.fed += count_fed_rows(output)

    def row(self) -> Row:
        """The figures as they are written; `p_cache` is tokens over rows fed after the prompt."""
        problems, accuracy = len(self.right), sum(self.right) / len(self.right)
        return {
            "task": self.task,
            "model": self.model,
            "kind": self.kind,
            "setting": self.setting,
            "problems": problems,
            "accuracy": round(accuracy, 4),
            "standard_error": round(math.sqrt(accuracy * (1 - accuracy) / problems), 4),
            "tokens_per_forward": round(self.tokens / self.forwards, 3),
            "tokens_per_second": round(self.tokens / sum(t.cpu for t in self.timings), 1),
            "tokens_per_wall_second": round(self.tokens / sum(t.wall for t in self.timings), 1),
            "p_cache": round(self.tokens / self.fed, 3) if self.fed else None,
            "tokens_per_answer": round(self.tokens / problems, 1),
            "method": repr(self.method),
        }


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options of every curve: how much is solved, and what is drawn."""
    parser = harness.arguments(doc, rounds=None)
    parser.add_argument("--limit", type=int, default=500, help="problems of each task (500)")
    parser.add_argument("--minutes", type=float, help="end earlier, after this many CPU minutes")
    parser.add_argument("--batch", type=int, default=1, help="problems at a time (1)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (128)")
    parser.add_argument("--png", type=Path, help="picture")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw what this file holds")
    return parser


def figures(points: Sequence[Point]) -> Summary:
    """The row of each point, without a bar."""
    return {"results": [point.row() for point in points]}, []


def results(
    options: argparse.Namespace,
    points: Sequence[Point],
    summary: Callable[[Sequence[Point]], Summary] = figures,
) -> list[Row]:
    """A row for each setting: measured, written after each turn and shown, or those of a file."""
    if options.draw is not None:
        drawn: list[Row] = json.loads(options.draw.read_text())["results"]
        return drawn
    harness.prepare(options)
    tables: dict[str, list[Row]] = {}
    bars: list[Bar] = []
    for _ in solve(points, options):
        tables, bars = summary(points)
        harness.save(options, tables, bars)
    for title, rows in tables.items():
        harness.show(title, [{k: row[k] for k in row if k not in HIDDEN} for row in rows])
    harness.finish(options, tables, bars)
    return tables["results"]


def solve(points: Sequence[Point], options: argparse.Namespace) -> Iterator[None]:
    """Turn after turn of all points."""
    names = dict.fromkeys(point.model for point in points)
    llms = {name: LLM(name, prefix_cache=False) for name in names}
    tasks = dict.fromkeys(point.task for point in points)
    questions = {task: questions_of(task, options.limit) for task in tasks}
    for point in points:
        prompt, tokens = [questions[point.task][0].prompt], options.max_tokens
        llms[point.model].generate(prompt, method=point.method, max_tokens=tokens, temperature=0.0)
    began, turn = time.process_time(), max(10, options.batch)
    for index, first in enumerate(track(range(0, options.limit, turn), "turns")):
        for point in points[:: -1 if index % 2 else 1]:
            part = questions[point.task][first : first + turn]
            for begin in range(0, len(part), options.batch):
                batch = part[begin : begin + options.batch]
                point.solve(llms[point.model], batch, options.max_tokens)
        yield
        if options.minutes is not None and time.process_time() - began > 60 * options.minutes:
            return


def plot(pane: Axes, line: Sequence[Row], key: str, *, color: str, **style: Any) -> None:
    """Accuracy of a line against one of its figures, with standard errors and settings."""
    errors = [100 * row["standard_error"] for row in line]
    x, y = [row[key] for row in line], [100 * row["accuracy"] for row in line]
    pane.errorbar(x, y, yerr=errors, color=color, markersize=5, capsize=2, **style)
    for row, left, height in zip(line, x, y, strict=True):
        pane.annotate(
            row["setting"], (left, height), (4, 4), textcoords="offset points", size=6, color=color
        )


def frame(pane: Axes, label: str) -> None:
    """What stands around the lines of a pane."""
    pane.set_xlabel(label)
    pane.grid(alpha=0.3)
    pane.margins(x=0.09)
