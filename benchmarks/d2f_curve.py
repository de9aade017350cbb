"""Discrete diffusion forcing: accuracy against speed over confidence and add, all in one run.

    python benchmarks/d2f_curve.py --json benchmarks/results/d2f_curve.json --png docs/d2f-curve.png

`tiny-d2f` solves held-out story problems greedily, one at a time, under every pair of `confidence`
and `add`; add = 1 is one block at a time, the pipeline switched off. Beside it stand `tiny-ar`,
autoregressive, and `tiny-dream`, of which it is a student, in its own order with one token a
forward. The table of needs says how many tokens per forward it would take, at what a forward
costs here, to be that much faster than `tiny-ar`. `--draw` makes the picture again from a JSON
file. How it is measured: `curve.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

import curve
from curve import Point, Summary
from harness import Bar, Row
from outpace.methods import D2F, Autoregressive, Diffusion

CONFIDENCES = (0.7, 0.9, 0.95, 0.99)
ADDS = (0.1, 0.5, 1.0)
OVER_AR, OVER_OWN, LOSS = 2.5, 4.0, 0.02
STYLES = {0.1: "#2166ac", 0.5: "#92c5de", 1.0: "#b2182b"}
AR, OWN = "autoregressive (tiny-ar)", "own order, full steps (tiny-dream)"


def settings(options: argparse.Namespace) -> list[Point]:
    """All points, the baselines first."""
    points = [
        Point(AR, "", "tiny-ar", Autoregressive()),
        Point(OWN, "", "tiny-dream", Diffusion()),
    ]
    for add in ADDS:
        for confidence in CONFIDENCES:
            method = D2F(block=options.block, add=add, confidence=confidence)
            points.append(Point(f"add {add}", str(confidence), options.model, method))
    return points


def with_cost(row: Row) -> Row:
    """A forward's CPU milliseconds follow from both rates."""
    cost = 1e3 * row["tokens_per_forward"] / row["tokens_per_second"]
    return {**row, "ms_per_forward": round(cost, 2)}


def needs(rows: Sequence[Row]) -> list[Row]:
    """Tokens per forward that would make each setting `OVER_AR` times as fast as `tiny-ar`."""
    rate = next(row["tokens_per_second"] for row in rows if row["kind"] == AR)
    return [
        {
            "setting": f"{row['kind']}, confidence {row['setting']}",
            "ms per forward": row["ms_per_forward"],
            "tokens per forward": row["tokens_per_forward"],
            f"needed for {OVER_AR} x": round(OVER_AR * rate * row["ms_per_forward"] / 1e3, 2),
            "times tiny-ar": round(row["tokens_per_second"] / rate, 2),
        }
        for row in rows
        if row["setting"]
    ]


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    """The fastest setting that loses no more than `LOSS` of the accuracy of the own order."""
    ar, own = (next(row for row in rows if row["kind"] == kind) for kind in (AR, OWN))
    good = [r for r in rows if r["setting"] and r["accuracy"] >= own["accuracy"] - LOSS]
    best = max((row["tokens_per_second"] for row in good), default=0.0)
    return [
        Bar(
            what=f"tokens/s over {base['kind']}",
            value=best / base["tokens_per_second"],
            limit=limit,
            at_least=True,
        )
        for base, limit in ((ar, OVER_AR), (own, OVER_OWN))
    ]


def summary(points: Sequence[Point]) -> Summary:
    """The figures of all points, and what would be needed."""
    rows = [with_cost(point.row()) for point in points]
    return {"results": rows, "needs": needs(rows)}, bars_of(rows)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against tokens per forward and against tokens per second."""

    def lines(pane: Axes, key: str) -> None:
        for add, color in STYLES.items():
            line = [row for row in rows if row["kind"] == f"add {add}"]
            title = f"D2F, add {add}" + (" (one block at a time)" if add == 1 else "")
            curve.plot(pane, line, key, label=title, color=color, marker="o")
        for kind, color, marker in ((AR, "#444444", "D"), (OWN, "#e08214", "s")):
            line = [row for row in rows if row["kind"] == kind]
            curve.plot(pane, line, key, label=kind, color=color, marker=marker)

    model = next(row["model"] for row in rows if row["setting"])
    title = f"{model}: confidence (at the points) and add, one problem at a time, CPU"
    curve.picture(path, title, lines, "center left")


def main() -> None:
    """Measure, write and draw."""
    parser = curve.arguments(__doc__)
    parser.add_argument("--model", default="tiny-d2f")
    parser.add_argument("--block", type=int, default=16)
    options = parser.parse_args()
    rows = curve.results(options, settings(options), summary)
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
