"""Orders, steps and caches of diffusion decoding: accuracy against speed, all in one run.

    python benchmarks/orders.py --json benchmarks/results/orders.json --png docs/orders.png

The miniature of Table 1 of "Accelerating Diffusion LLMs via Adaptive Parallel Decoding" (Israel et
al., 2025), with the caches and thresholds of Fast-dLLM beside it. Steps are shared evenly; `full`
is one token a forward. `--draw` makes picture and table again from the JSON. How it is measured:
`curve.py`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import curve
import harness
import matplotlib
import numpy as np
from curve import Point
from harness import Bar, Row

from outpace.methods import Diffusion, FastDLLM

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


def settings(options: argparse.Namespace) -> list[Point]:
    """All orders and caches in blocks of one size, and the main ones in smaller blocks."""
    points: list[Point] = []

    def add(kind: str, setting: str, method: Diffusion | FastDLLM) -> None:
        points.append(Point(kind, setting, options.model, method))

    for size in dict.fromkeys((options.block, options.small)):
        for order in ORDERS if size == options.block else ("confidence",):
            for name, part in STEPS.items():
                steps = options.max_tokens // part
                method = Diffusion(order=order, steps=steps, block=size, eps=0.0)
                add(order, name, method)
        for kind, cache in (("no cache", None), ("prefix cache", "prefix")):
            if size == options.block:
                method = FastDLLM(cache=cache, threshold=0.9, block=size)
                add(kind, "threshold 0.9", method)
        for threshold in (None, *THRESHOLDS):
            setting = "one a forward" if threshold is None else f"threshold {threshold}"
            method = FastDLLM(cache="dual", threshold=threshold, block=size)
            add("dual cache", setting, method)
        method = FastDLLM(cache="dual", factor=1.0, block=size)
        add("dual cache", "factor 1", method)
    return points


def block_of(point: Point) -> int | None:
    """Length of the blocks of a setting."""
    assert isinstance(point.method, Diffusion | FastDLLM)
    return point.method.block


def bars_of(points: Sequence[Point]) -> tuple[list[Bar], list[Row]]:
    """Dual cache with a threshold against the uncached confidence order in the same blocks.

    A threshold stands against the order in as many steps as give no more tokens per forward. Of the
    thresholds that lose no more than `LOSS` of the accuracy, the fastest counts.
    """
    bars, pairs = [], []
    for block in dict.fromkeys(map(block_of, points)):
        same = [point for point in points if block_of(point) == block]
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
    """Solve problem after problem, and write what there is after each turn."""
    kinds = options.kinds.split(",") if options.kinds else list(STYLES)
    points = [p for p in settings(options) if p.kind in kinds]
    if options.settings:
        points = [p for p in points if p.setting in options.settings.split(",")]
    for figures in curve.solve(points, options):
        bars, pairs = bars_of(points)
        blocks = zip(points, figures, strict=True)
        rows: list[Row] = [{"block": block_of(point), **row} for point, row in blocks]
        harness.save(options, {"results": rows, "pairs": pairs}, bars)
    harness.show(f"{options.model}, {options.batch} at a time", rows)
    harness.show("dual cache against confidence", pairs)
    harness.finish(options, {"results": rows, "pairs": pairs}, bars)


def main() -> None:
    """Measure, write and draw."""
    parser = harness.arguments(__doc__, rounds=None)
    parser.add_argument("--model", default="tiny-dream")
    parser.add_argument("--kinds", help="only these, such as 'confidence,dual cache'")
    parser.add_argument("--settings", help="only these, such as 'full,threshold 0.99'")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--small", type=int, default=8, help="tokens of the smaller blocks (8)")
    parser.add_argument("--png", type=Path)
    curve.add_options(parser)
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
