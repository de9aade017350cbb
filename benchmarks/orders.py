"""Orders, steps and caches of diffusion decoding: accuracy against speed, all in one run.

    python benchmarks/orders.py --json benchmarks/results/orders.json --png docs/orders.png

The miniature of Table 1 of "Accelerating Diffusion LLMs via Adaptive Parallel Decoding" (Israel et
al., 2025), with the caches and thresholds of Fast-dLLM beside it. Held-out story problems are
solved greedily, `batch` at a time, by all settings in turn before the next ones are, so that a slow
minute of the machine falls on all settings alike, and a run that ends early has solved the same
problems with each. Tokens per second are of CPU time, on one thread: what the wall clock shows
where nothing else runs. Steps are shared evenly; `full` is one token a forward. `--draw` makes
picture and table again from the JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import matplotlib
import numpy as np
from harness import Bar, Row, Timing
from rich.progress import track

from outpace import LLM
from outpace.evaluation.run import questions_of
from outpace.evaluation.tasks import Question
from outpace.methods import Diffusion, FastDLLM, Method

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ORDERS = ("origin", "confidence", "margin", "entropy", "left_to_right")
STEPS = {"full": 1, "half": 2, "quarter": 4}
THRESHOLDS = (0.8, 0.9, 0.95, 0.99)
FASTER, LOSS = 3.0, 0.02
STYLES = {
    "origin": "#999999",
    "confidence": "#b2182b",
    "margin": "#ef8a62",
    "entropy": "#e7b800",
    "left_to_right": "#444444",
    "no cache": "#92c5de",
    "prefix cache": "#4393c3",
    "dual cache": "#2166ac",
}


@dataclass(slots=True)
class Point:
    """One setting, and what it has come to."""

    kind: str
    setting: str
    block: int
    method: Method
    right: list[bool] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    timings: list[Timing] = field(default_factory=list)

    def solve(self, llm: LLM, questions: Sequence[Question], max_tokens: int) -> None:
        """Answer some questions together, and count them."""
        prompts = [question.prompt for question in questions]
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, method=self.method, max_tokens=max_tokens, temperature=0.0)
        self.timings.append(Timing(time.process_time() - cpu, time.perf_counter() - wall))
        for question, output in zip(questions, outputs, strict=True):
            self.right.append(question.right(output.text))
            self.tokens += len(output.ids)
            self.forwards += output.forwards

    def row(self) -> Row:
        """The figures as they are written."""
        problems, accuracy = len(self.right), sum(self.right) / len(self.right)
        return {
            "block": self.block,
            "kind": self.kind,
            "setting": self.setting,
            "problems": problems,
            "accuracy": round(accuracy, 4),
            "standard_error": round(math.sqrt(accuracy * (1 - accuracy) / problems), 4),
            "tokens_per_forward": round(self.tokens / self.forwards, 3),
            "tokens_per_second": round(self.tokens / sum(t.cpu for t in self.timings), 1),
            "tokens_per_wall_second": round(self.tokens / sum(t.wall for t in self.timings), 1),
            "tokens_per_answer": round(self.tokens / problems, 1),
        }


def settings(options: argparse.Namespace) -> list[Point]:
    """All orders and caches in blocks of one size, and the main ones in smaller blocks."""
    points = []
    for size in dict.fromkeys((options.block, options.small)):
        for order in ORDERS if size == options.block else ("confidence",):
            for name, part in STEPS.items():
                steps = options.max_tokens // part
                method = Diffusion(order=order, steps=steps, block=size, eps=0.0)
                points.append(Point(order, name, size, method))
        for kind, cache in (("no cache", None), ("prefix cache", "prefix")):
            if size == options.block:
                method = FastDLLM(cache=cache, threshold=0.9, block=size)
                points.append(Point(kind, "threshold 0.9", size, method))
        for threshold in (None, *THRESHOLDS):
            setting = "one a forward" if threshold is None else f"threshold {threshold}"
            method = FastDLLM(cache="dual", threshold=threshold, block=size)
            points.append(Point("dual cache", setting, size, method))
        method = FastDLLM(cache="dual", factor=1.0, block=size)
        points.append(Point("dual cache", "factor 1", size, method))
    return points


def bars_of(points: Sequence[Point]) -> tuple[list[Bar], list[Row]]:
    """Dual cache with a threshold against the uncached confidence order in the same blocks.

    A threshold stands against the order in as many steps as give no more tokens per forward. Of the
    thresholds that lose no more than `LOSS` of the accuracy, the fastest counts.
    """
    bars, pairs = [], []
    for block in dict.fromkeys(point.block for point in points):
        same = [point for point in points if point.block == block]
        for plain in (p for p in same if p.kind == "confidence"):
            rates = [0.0]
            for dual in (p for p in same if p.kind == "dual cache" and "threshold" in p.setting):
                a, b = dual.row(), plain.row()
                if a["tokens_per_forward"] < b["tokens_per_forward"]:
                    continue
                change = np.subtract(dual.right, plain.right, dtype=float)
                faster = a["tokens_per_second"] / b["tokens_per_second"]
                pairs.append(
                    {
                        "block": block,
                        "dual cache": dual.setting,
                        "confidence": plain.setting,
                        "times_tokens_per_second": round(faster, 2),
                        "accuracy_change": round(float(change.mean()), 4),
                        "standard_error": round(float(change.std() / math.sqrt(len(change))), 4),
                    }
                )
                if change.mean() >= -LOSS:
                    rates.append(faster)
            what = f"tokens/s over confidence, {plain.setting} steps, blocks of {block}"
            bars.append(Bar(what=what, value=max(rates), limit=FASTER, at_least=True))
    return bars, pairs


def markdown(rows: Sequence[Row]) -> str:
    """The table of the documentation."""
    head = ("blocks of", "order or cache", "steps or rule", "accuracy", "tokens per forward")
    lines = ["| " + " | ".join((*head, "tokens per second")) + " |", "|" + "---|" * 6]
    for row in rows:
        accuracy = f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f} %"
        cells = (
            *(str(row["block"]), row["kind"].replace("_", " "), row["setting"], accuracy),
            *(f"{row['tokens_per_forward']:.2f}", f"{row['tokens_per_second']:.0f}"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against tokens per second, a pane for each size of blocks."""
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    figure, panes = plt.subplots(
        1, len(blocks), figsize=(11, 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    for pane, block in zip(panes[0], blocks, strict=True):
        for kind, color in STYLES.items():
            line = [r for r in rows if (r["block"], r["kind"]) == (block, kind)]
            rule = sorted(
                (r for r in line if r["setting"] != "factor 1"),
                key=lambda r: r["tokens_per_second"],
            )
            marker = "o" if "cache" in kind else "s"
            pane.errorbar(
                [r["tokens_per_second"] for r in rule],
                [100 * r["accuracy"] for r in rule],
                yerr=[100 * r["standard_error"] for r in rule],
                label=kind.replace("_", " ") if rule else None,
                color=color,
                marker=marker,
                markersize=5,
                capsize=2,
            )
            for r in rule:
                name = r["setting"].removeprefix("threshold ").replace("one a forward", "one")
                where = (r["tokens_per_second"], 100 * r["accuracy"])
                pane.annotate(name, where, (4, 4), textcoords="offset points", size=6, color=color)
        pane.set_title(f"blocks of {block}", size=10)
        pane.set_xscale("log")
        pane.set_xticks([50, 100, 200, 400, 800], ["50", "100", "200", "400", "800"])
        pane.minorticks_off()
        pane.set_xlabel("tokens per second (logarithmic)")
        pane.grid(alpha=0.3)
    panes[0, 0].set_ylabel("accuracy on held-out story problems (%)")
    panes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def measure(options: argparse.Namespace) -> None:
    """Solve problem after problem, and write what there is after each round."""
    llm = LLM(options.model)
    kinds = options.kinds.split(",") if options.kinds else list(STYLES)
    points = [p for p in settings(options) if p.kind in kinds]
    if options.settings:
        points = [p for p in points if p.setting in options.settings.split(",")]
    questions = questions_of("story", options.limit)
    for point in points:
        llm.generate(
            [questions[0].prompt],
            method=point.method,
            max_tokens=options.max_tokens,
            temperature=0.0,
        )
    began = time.process_time()
    for first in track(range(0, len(questions), options.batch), "rounds"):
        for point in points:
            point.solve(llm, questions[first : first + options.batch], options.max_tokens)
        bars, pairs = bars_of(points)
        shared = {"model": options.model, "batch": options.batch}
        rows: list[Row] = [{**shared, **point.row()} for point in points]
        harness.save(options, {"results": rows, "pairs": pairs}, bars)
        if options.minutes is not None and time.process_time() - began > 60 * options.minutes:
            break
    harness.show(f"{options.model}, {options.batch} at a time", rows)
    harness.show("dual cache against confidence", pairs)
    harness.finish(options, {"results": rows, "pairs": pairs}, bars)


def main() -> None:
    """Measure, write and draw."""
    parser = harness.arguments(__doc__, rounds=None)
    parser.add_argument("--model", default="tiny-dream")
    parser.add_argument("--limit", type=int, default=500, help="problems (500)")
    parser.add_argument("--minutes", type=float, help="end earlier, after this many CPU minutes")
    parser.add_argument("--batch", type=int, default=1, help="problems at a time (1)")
    parser.add_argument("--kinds", help="only these, such as 'confidence,dual cache'")
    parser.add_argument("--settings", help="only these, such as 'full,threshold 0.99'")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--small", type=int, default=8, help="tokens of the smaller blocks (8)")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--draw", action="store_true", help="only draw what the JSON holds")
    options = parser.parse_args()
    harness.prepare(options)
    if not options.draw:
        measure(options)
    if options.json is not None:
        rows: list[dict[str, Any]] = json.loads(options.json.read_text())["results"]
        print(markdown(rows))
        if options.png is not None:
            draw(rows, options.png)


if __name__ == "__main__":
    main()
