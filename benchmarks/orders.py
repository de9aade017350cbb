"""Orders, steps and caches of diffusion decoding: accuracy against speed, all in one run.

    python benchmarks/orders.py --json benchmarks/results/orders.json --png docs/orders.png

The miniature of Table 1 of "Accelerating Diffusion LLMs via Adaptive Parallel Decoding" (Israel et
al., 2025), with the caches and thresholds of Fast-dLLM beside it. Steps are shared evenly; `full`
is one token per forward. `--draw` makes picture and table again from a JSON file. How it is
measured: `curve.py`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

import curve
from curve import Point, Summary
from harness import Bar, Row
from outpace.decoding.target import HoleOrder
from outpace.methods import Diffusion, FastDLLM, Method

ORDERS: tuple[HoleOrder, ...] = ("origin", "confidence", "margin", "entropy", "left_to_right")
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
    smaller = [] if options.small == options.block else in_blocks(options, options.small)
    main = [p for p in smaller if p.kind in ("confidence", "dual cache")]
    return [*in_blocks(options, options.block), *main]


def in_blocks(options: argparse.Namespace, size: int) -> list[Point]:
    """All orders and caches in blocks of one size."""

    def point(kind: str, setting: str, method: Method) -> Point:
        return Point(kind, setting, options.model, method)

    def dual(threshold: float | None) -> FastDLLM:
        return FastDLLM(cache="dual", threshold=threshold, block=size)

    plain = FastDLLM(cache=None, threshold=0.9, block=size)
    prefix = FastDLLM(cache="prefix", threshold=0.9, block=size)
    factor = FastDLLM(cache="dual", factor=1.0, block=size)
    return [
        *(
            point(order, name, Diffusion(order=order, steps=steps, block=size, eps=0.0))
            for order in ORDERS
            for name, steps in steps_of(options.max_tokens).items()
        ),
        point("no cache", "threshold 0.9", plain),
        point("prefix cache", "threshold 0.9", prefix),
        point("dual cache", "one per forward", dual(None)),
        *(point("dual cache", f"threshold {level}", dual(level)) for level in THRESHOLDS),
        point("dual cache", "factor 1", factor),
    ]


def steps_of(tokens: int) -> dict[str, int]:
    """Steps for an answer of so many tokens, by name."""
    return {"full": tokens, "half": tokens // 2, "quarter": tokens // 4}


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
        lines(pane, [row for row in rows if row["block"] == block])
        curve.frame(pane, "tokens per second (logarithmic)")
        pane.set_title(f"blocks of {block}", size=10)
    panes[0, 0].set_ylabel("accuracy on held-out story problems (%)")
    panes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def lines(pane: Axes, rows: Sequence[Row]) -> None:
    """Orders and caches in blocks of one size, each from the slowest setting to the fastest."""
    for kind, color in STYLES.items():
        line = [
            {**row, "setting": short(row["setting"])}
            for row in sorted(rows, key=lambda row: row["tokens_per_second"])
            if row["kind"] == kind and row["setting"] != "factor 1"
        ]
        if line:
            marker, label = "o" if "cache" in kind else "s", kind.replace("_", " ")
            curve.plot(pane, line, "tokens_per_second", color=color, label=label, marker=marker)
    pane.set_xscale("log")
    pane.set_xticks([50, 100, 200, 400, 800], ["50", "100", "200", "400", "800"])
    pane.minorticks_off()


def short(setting: str) -> str:
    """A setting as it is written beside its point."""
    return setting.removeprefix("threshold ").replace("one per forward", "one")


def summary(points: Sequence[Point]) -> Summary:
    """The figures of all points, and the caches against the orders."""
    bars, pairs = bars_of(points)
    rows: list[Row] = [{"block": block_of(point), **point.row()} for point in points]
    return {"results": rows, "pairs": pairs}, bars


def chosen(points: Sequence[Point], options: argparse.Namespace) -> list[Point]:
    """The kinds and settings that are asked for."""
    return [
        point
        for point in points
        if point.kind in (options.kinds or point.kind).split(",")
        and point.setting in (options.settings or point.setting).split(",")
    ]


def main() -> None:
    """Measure, write and draw."""
    parser = curve.arguments(__doc__)
    parser.add_argument("--model", default="tiny-dream", help="of diffusion (tiny-dream)")
    parser.add_argument("--kinds", help="only these, such as 'confidence,dual cache'")
    parser.add_argument("--settings", help="only these, such as 'full,threshold 0.99'")
    parser.add_argument("--block", type=int, default=32, help="tokens of a block (32)")
    parser.add_argument("--small", type=int, default=8, help="tokens of the smaller blocks (8)")
    options = parser.parse_args()
    rows = curve.results(options, chosen(settings(options), options), summary)
    print(markdown(rows))
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
