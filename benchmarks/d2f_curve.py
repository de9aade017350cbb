"""Discrete diffusion forcing: accuracy against speed over confidence and add, all in one run.

    python benchmarks/d2f_curve.py --json benchmarks/results/d2f_curve.json --png docs/d2f-curve.png

`tiny-d2f` solves held-out story problems greedily, one at a time, under every pair of `confidence`
and `add`; add = 1 is one block at a time, the pipeline switched off. Beside it stand `tiny-ar`,
autoregressive, and `tiny-dream`, of which it is a student, in its own order with one token a
forward. The table of needs says how many tokens a forward would have to bring, at what a forward
costs here, to be that much faster than `tiny-ar`. `--draw` makes picture and tables again from the
JSON. How it is measured: `curve.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import curve
import harness
import matplotlib
from curve import Point
from harness import Bar, Row

from outpace.methods import D2F, Autoregressive, Diffusion

matplotlib.use("Agg")
import matplotlib.pyplot as plt

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
    """Tokens a forward that would make each setting `OVER_AR` times as fast as `tiny-ar`."""
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
        Bar(what=f"tokens/s over {kind['kind']}", value=best / kind["tokens_per_second"], **limit)
        for kind, limit in (
            (ar, {"limit": OVER_AR, "at_least": True}),
            (own, {"limit": OVER_OWN, "at_least": True}),
        )
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against tokens per forward and against tokens per second."""
    figure, panes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    axes = ("tokens_per_forward", "tokens per forward"), ("tokens_per_second", "tokens per second")
    for pane, (key, label) in zip(panes, axes, strict=True):
        for add, colour in STYLES.items():
            line = [row for row in rows if row["kind"] == f"add {add}"]
            title = f"D2F, add {add}" + (" (one block at a time)" if add == 1 else "")
            curve.plot(pane, line, key, label=title, color=colour, marker="o")
        for kind, colour, marker in ((AR, "#444444", "D"), (OWN, "#e08214", "s")):
            line = [row for row in rows if row["kind"] == kind]
            curve.plot(pane, line, key, label=kind, color=colour, marker=marker)
        pane.set_xlabel(label)
        pane.grid(alpha=0.3)
        pane.margins(x=0.09)
    panes[0].set_ylabel("accuracy on held-out story problems (%)")
    panes[0].legend(fontsize=8, loc="center left")
    model = next(row["model"] for row in rows if row["setting"])
    figure.suptitle(f"{model}: confidence (at the points) and add, one problem at a time, CPU")
    figure.savefig(path, dpi=150)


def measure(options: argparse.Namespace) -> None:
    """Solve problems in turn, and write what there is after each turn."""
    for figures in curve.solve(settings(options), options):
        rows = [with_cost(row) for row in figures]
        harness.save(options, {"results": rows, "needs": needs(rows)}, bars_of(rows))


def main() -> None:
    """Measure, write and draw."""
    parser = harness.arguments(__doc__, rounds=None)
    parser.add_argument("--model", default="tiny-d2f")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--png", type=Path)
    curve.add_options(parser)
    options = parser.parse_args()
    if options.json is None:
        parser.error("--json names the file for the result")
    harness.prepare(options)
    if not options.draw:
        measure(options)
    rows: list[Row] = json.loads(options.json.read_text())["results"]
    dropped = ("task", "problems", "tokens_per_wall_second", "tokens_per_answer", "method")
    shown = [{key: row[key] for key in row if key not in dropped} for row in rows]
    harness.show("accuracy and speed", shown)
    harness.show("tokens a forward", needs(rows))
    harness.show("bars", [{"what": b.what, "value": b.value, "met": b.met} for b in bars_of(rows)])
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
