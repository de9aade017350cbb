"""The plot of a figure: what was measured beside the published points."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from outpace.benchmark.plots import (
    SPEEDS,
    Results,
    group_by_line,
    new_figure,
    plot_line,
    save_figure,
)
from outpace.evaluation.compare import ResultRecord

CLOCKED = SPEEDS | {"tokens_per_second": "tokens per second", "speedup": "times as fast"}
HEIGHTS = {"accuracy": "accuracy (%)", "acceptance_length": "acceptance length"}


def draw_figure(results: Results, published: Results, title: str, path: Path) -> None:
    """Write a plot of accuracy, or what is accepted, against speed: here and in the paper."""
    figure = new_figure(12.4, 5.2)
    here, there = figure.subplots(1, 2)
    key = "tokens_per_cpu_second" if results[0]["clock"] == "cpu" else "tokens_per_second"
    speed, height = axes_of(published)
    for name, line in group_by_line(results).items():
        plot_line(here, line, key, name, height)
    shown = [point for point in published if {speed, height} <= set(point)]
    for name in dict.fromkeys(point["setting"] for point in shown):
        line = [point for point in shown if point["setting"] == name]
        x, y = ([point[axis] for point in line] for axis in (speed, height))
        there.plot(x, y, "o", fillstyle="none", label=name)
        for point in line:
            place = (point[speed], point[height])
            there.annotate(differing(point), place, (4, 4), textcoords="offset points", size=6)
    if not shown:
        center = {"ha": "center", "transform": there.transAxes}
        there.text(0.5, 0.5, "no points with both figures", **center)
    for pane, name in ((here, CLOCKED[key]), (there, f"{CLOCKED[speed]}, as published")):
        pane.set_xlabel(name)
        pane.set_ylabel(HEIGHTS[height])
        pane.grid(alpha=0.3)
        pane.margins(x=0.14, y=0.09)
        if pane.get_legend_handles_labels()[0]:
            pane.legend(loc="upper left", bbox_to_anchor=(0, -0.1), fontsize=6, frameon=False)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def axes_of(published: Results) -> tuple[str, str]:
    """The speed and the height that most published points have both of."""
    pairs = product(("tokens_per_second", "speedup"), HEIGHTS)
    return max(pairs, key=lambda pair: sum(set(pair) <= set(point) for point in published))


def differing(point: ResultRecord) -> str:
    """Fields of a published point other than its figures, as a label."""
    figures = (
        "accuracy",
        "tokens_per_",
        "latency",
        "answer_tokens",
        "place",
        "setting",
        "speedup",
        "acceptance",
    )
    return ", ".join(f"{k}={v}" for k, v in point.items() if not k.startswith(figures))
