"""What `tiny-wedlm` gains, and what it costs: accuracy against speed, all in one run.

    python benchmarks/wedlm_curve.py --json benchmarks/results/wedlm-curve.json \
        --png docs/wedlm-curve.png

Stories and the low-entropy tables, by: entropy and penalty; the window; streaming against
stop-and-wait blocks; what verification keeps; and token by token, by the same weights and by the
autoregressive baseline. `p_cache` is output tokens over rows fed after the prompt, as in the paper:
at most one half where every token is fed as a mask and as itself. `--draw` makes the picture again
from a JSON file. How it is measured: `curve.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import curve
from curve import Point, Summary
from harness import Bar, Row
from outpace.methods import Autoregressive, Method, WeDLM

TASKS = ("story", "table")
ENTROPIES = (0.1, 0.2, 0.4, 0.6, 0.9, 1.2)
PENALTIES = (0.0, 0.02, 0.1)
WINDOWS = (4, 8, 32)
LOSS, FASTER, FORWARD = 0.01, 2.5, 4.0
STREAMING = "streaming, penalty "
STYLES = {
    "baseline": ("#444444", "D"),
    "token by token": ("#999999", "D"),
    "one per forward": ("#000000", "*"),
    f"{STREAMING}0.0": ("#92c5de", "o"),
    f"{STREAMING}0.02": ("#2166ac", "o"),
    f"{STREAMING}0.1": ("#053061", "o"),
    "blocks": ("#b2182b", "s"),
    "verified": ("#1b7837", "^"),
    "window": ("#e7b800", "v"),
}


def settings(task: str, options: argparse.Namespace) -> list[Point]:
    """All settings of a task, the baselines first."""
    window, own = options.window, options.model

    def point(series: str, setting: str, method: Method, model: str = own) -> Point:
        return Point(series, setting, model, method, task)

    points = [
        point("baseline", options.baseline, Autoregressive(), options.baseline),
        point("token by token", "its own", Autoregressive()),
        point("one per forward", "1", WeDLM(window=window, entropy=None)),
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


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    """Speed at the fastest setting that costs no more than `LOSS` of the accuracy.

    The accuracy is that of the same weights with one token per forward.
    """
    bars = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        one = next(row for row in here if row["kind"] == "one per forward")
        base = next(row for row in here if row["kind"] == "baseline")
        masked = [row for row in here if row["kind"] not in ("baseline", "token by token")]
        fair = [row for row in masked if row["accuracy"] >= one["accuracy"] - LOSS]
        best = max(fair, key=lambda row: row["tokens_per_second"])
        where = f"{task}: {best['kind']}, entropy {best['setting']}"
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
    named = {series: [row for row in rows if row["kind"] == series] for series in STYLES}
    return {series: found for series, found in named.items() if found}


def accuracy(pane: Axes, rows: Sequence[Row], key: str, label: str) -> None:
    """Accuracy of all settings against one kind of speed; of those that solve anything."""
    rows = [row for row in rows if row["accuracy"]]
    for series, found in lines(rows).items():
        color, marker = STYLES[series]
        joined = "" if series == "window" else "-"
        curve.plot(pane, found, key, label=series, color=color, marker=marker, ls=joined, lw=1)
    curve.frame(pane, label)


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


def summary(points: Sequence[Point]) -> Summary:
    """The figures of all points, and the bars."""
    rows = [point.row() for point in points]
    return {"results": rows}, bars_of(rows)


def main() -> None:
    """Measure, write and draw."""
    parser = curve.arguments(__doc__)
    parser.add_argument("--model", default="tiny-wedlm", help="the model that fills masks")
    parser.add_argument("--baseline", default="tiny-ar", help="its autoregressive counterpart")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="what to solve")
    parser.add_argument("--window", type=int, default=16, help="slots of the window (16)")
    options = parser.parse_args()
    points = [point for task in options.tasks for point in settings(task, options)]
    rows = curve.results(options, points, summary)
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
