"""What `tiny-wedlm` gains, and what it costs: accuracy against speed, all in one run.

    python benchmarks/wedlm_curve.py --json benchmarks/results/wedlm-curve.json \
        --png docs/wedlm-curve.png

Held-out problems, stories and the low-entropy tables, are solved greedily one at a time by all
settings in turn before the next ones are, so that a slow minute of the machine falls on all of them
alike. The settings: entropy and penalty; the window; streaming against stop-and-wait blocks; what
verification keeps; and token by token, by the same weights and by the autoregressive baseline.
Tokens per second are of CPU time on one thread, which is what the wall clock shows where nothing
else runs. `p_cache` is output tokens over rows fed after the prompt, as in the paper: at most one
half where every token is fed as a mask and as itself. `--draw` makes the picture again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import harness
import matplotlib
from harness import Bar, Row, Timing
from matplotlib.axes import Axes
from rich.progress import track

from outpace import LLM
from outpace.evaluation.run import questions_of
from outpace.evaluation.tasks import Question
from outpace.methods import Autoregressive, Method, WeDLM

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TASKS = ("story", "table")
ENTROPIES = (0.1, 0.2, 0.4, 0.6, 0.9, 1.2)
PENALTIES = (0.0, 0.02, 0.1)
WINDOWS = (4, 8, 32)
LOSS, FASTER, FORWARD = 0.01, 2.5, 4.0
SLICE = 25
STREAMING = "streaming, penalty "
STYLES = {
    "baseline": ("#444444", "D"),
    "token by token": ("#999999", "D"),
    "one a forward": ("#000000", "*"),
    f"{STREAMING}0.0": ("#92c5de", "o"),
    f"{STREAMING}0.02": ("#2166ac", "o"),
    f"{STREAMING}0.1": ("#053061", "o"),
    "blocks": ("#b2182b", "s"),
    "verified": ("#1b7837", "^"),
    "window": ("#e7b800", "v"),
}


@dataclass(slots=True)
class Point:
    """One setting on one task, and what it has come to."""

    task: str
    series: str
    setting: str
    model: str
    method: Method
    right: list[bool] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    rows: int = 0
    timings: list[Timing] = field(default_factory=list)

    def solve(self, llm: LLM, questions: Sequence[Question], max_tokens: int) -> None:
        """Answer some questions, one at a time, and count."""
        for question in questions:
            wall, cpu = time.perf_counter(), time.process_time()
            (output,) = llm.generate(
                question.prompt, method=self.method, max_tokens=max_tokens, temperature=0.0
            )
            self.timings.append(Timing(time.process_time() - cpu, time.perf_counter() - wall))
            self.right.append(question.right(output.text))
            self.tokens += len(output.ids)
            self.forwards += output.forwards
            self.rows += sum(step.rows for step in output.steps) - output.prompt_tokens

    def row(self) -> Row:
        """The figures as they are written."""
        problems, accuracy = len(self.right), sum(self.right) / len(self.right)
        return {
            "task": self.task,
            "series": self.series,
            "setting": self.setting,
            "method": repr(self.method),
            "problems": problems,
            "accuracy": round(accuracy, 4),
            "standard_error": round(math.sqrt(accuracy * (1 - accuracy) / problems), 4),
            "tokens_per_forward": round(self.tokens / self.forwards, 3),
            "tokens_per_second": round(self.tokens / sum(t.cpu for t in self.timings), 1),
            "tokens_per_wall_second": round(self.tokens / sum(t.wall for t in self.timings), 1),
            "p_cache": round(self.tokens / self.rows, 3) if self.rows else None,
            "tokens_per_answer": round(self.tokens / problems, 1),
        }


def settings(task: str, options: argparse.Namespace) -> list[Point]:
    """All settings of a task, the baselines first."""
    window, own = options.window, options.model

    def point(series: str, setting: str, method: Method, model: str = own) -> Point:
        return Point(task, series, setting, model, method)

    points = [
        point("baseline", options.baseline, Autoregressive(), options.baseline),
        point("token by token", "its own", Autoregressive()),
        point("one a forward", "1", WeDLM(window=window, entropy=None)),
    ]
    for penalty in PENALTIES:
        for entropy in ENTROPIES:
            method = WeDLM(window=window, entropy=entropy, penalty=penalty)
            points.append(point(f"{STREAMING}{penalty}", f"{entropy}", method))
    for entropy in ENTROPIES[1::2]:
        method = WeDLM(window=window, entropy=entropy, block=True)
        points.append(point("blocks", f"{entropy}", method))
        method = WeDLM(window=window, entropy=entropy, verify=True)
        points.append(point("verified", f"{entropy}", method))
    for width in WINDOWS:
        points.append(point("window", f"W={width}", WeDLM(window=width)))
    return points


def measure(options: argparse.Namespace) -> list[Point]:
    """Solve all problems with all settings, in turn over slices of the problems."""
    llms = {name: LLM(name, prefix_cache=False) for name in (options.model, options.baseline)}
    points = [point for task in options.tasks for point in settings(task, options)]
    questions = {task: questions_of(task, options.limit) for task in options.tasks}
    for point in points:
        warm = questions[point.task][0].prompt
        llms[point.model].generate(warm, method=point.method, max_tokens=options.max_tokens)
    for index, first in enumerate(track(range(0, options.limit, SLICE), "slices")):
        for point in points[:: -1 if index % 2 else 1]:
            part = questions[point.task][first : first + SLICE]
            point.solve(llms[point.model], part, options.max_tokens)
        rows = [point.row() for point in points]
        harness.save(options, {"results": rows}, bars_of(rows))
    return points


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    """Speed at the fastest streaming setting that costs no more than `LOSS` of the accuracy.

    The accuracy is that of the same weights with one token a forward.
    """
    bars = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        one = next(row for row in here if row["series"] == "one a forward")
        base = next(row for row in here if row["series"] == "baseline")
        streaming = [r for r in here if r["series"].startswith(STREAMING) or r is one]
        fair = [row for row in streaming if row["accuracy"] >= one["accuracy"] - LOSS]
        best = max(fair, key=lambda row: row["tokens_per_second"])
        where = f"{task}: {best['series']}, entropy {best['setting']}"
        speed = best["tokens_per_second"] / base["tokens_per_second"]
        bars += [
            Bar(
                what=f"{where}: tokens/s over the baseline's",
                value=speed,
                limit=FASTER,
                at_least=True,
            ),
            Bar(
                what=f"{where}: tokens per forward",
                value=best["tokens_per_forward"],
                limit=FORWARD,
                at_least=True,
            ),
        ]
    return bars


def draw(rows: Sequence[Row], path: Path) -> None:
    """A row of panes for each task: accuracy against speed twice, and the shares of the cache."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    size = (15, 4.4 * len(tasks))
    figure, grid = plt.subplots(len(tasks), 3, figsize=size, layout="constrained", squeeze=False)
    for task, panes in zip(tasks, grid, strict=True):
        here = [row for row in rows if row["task"] == task]
        accuracy(panes[0], here, "tokens_per_forward", "tokens per forward")
        accuracy(panes[1], here, "tokens_per_second", "tokens per CPU second")
        shares(panes[2], here)
        panes[0].set_ylabel(f"accuracy on {task} (%)")
    grid[0][0].legend(fontsize=8, loc="lower left")
    figure.suptitle("tiny-wedlm, greedy, one at a time, CPU")
    figure.savefig(path, dpi=150)


def lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each series, in the order of the legend."""
    named = {series: [row for row in rows if row["series"] == series] for series in STYLES}
    return {series: found for series, found in named.items() if found}


def accuracy(pane: Axes, rows: Sequence[Row], key: str, label: str) -> None:
    """Accuracy of all settings against one kind of speed."""
    for series, found in lines(rows).items():
        color, marker = STYLES[series]
        joined = "" if series == "window" else "-"
        x, y = [row[key] for row in found], [100 * row["accuracy"] for row in found]
        errors = [100 * row["standard_error"] for row in found]
        pane.errorbar(
            x, y, errors, color=color, marker=marker, ls=joined, label=series, ms=5, capsize=2, lw=1
        )
        for row, left, height in zip(found, x, y, strict=True):
            pane.annotate(
                row["setting"], (left, height), (3, 3), textcoords="offset points", size=6
            )
    pane.set_xlabel(label)
    pane.grid(alpha=0.3)
    pane.margins(x=0.09)


def shares(pane: Axes, rows: Sequence[Row]) -> None:
    """Tokens per forward against tokens per row fed."""
    for series, found in lines([row for row in rows if row["p_cache"]]).items():
        if series in ("baseline", "token by token"):
            continue
        color, marker = STYLES[series]
        x, y = [row["p_cache"] for row in found], [row["tokens_per_forward"] for row in found]
        pane.plot(
            x, y, color=color, marker=marker, ls="" if series == "window" else "-", ms=5, lw=1
        )
    pane.set_xlabel("p_cache: output tokens per row fed")
    pane.set_ylabel("tokens per forward")
    pane.grid(alpha=0.3)


def main() -> None:
    """Measure, write and draw."""
    parser = harness.arguments(__doc__, rounds=None)
    parser.add_argument("--model", default="tiny-wedlm", help="the model that fills masks")
    parser.add_argument("--baseline", default="tiny-ar", help="its autoregressive counterpart")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="what to solve")
    parser.add_argument("--limit", type=int, default=500, help="problems of each task (500)")
    parser.add_argument("--window", type=int, default=16, help="slots of the window (16)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (128)")
    parser.add_argument("--png", type=Path, help="picture")
    parser.add_argument("--draw", action="store_true", help="only draw what the JSON holds")
    options = parser.parse_args()
    if options.draw:
        rows = json.loads(options.json.read_text())["results"]
    else:
        harness.prepare(options)
        rows = [point.row() for point in measure(options)]
        harness.show("settings", [{k: v for k, v in row.items() if k != "method"} for row in rows])
        harness.finish(options, {"results": rows}, bars_of(rows))
    if options.png:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
