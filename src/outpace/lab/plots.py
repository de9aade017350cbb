"""Plots: accuracy and speed of methods, figures of papers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

from outpace.cli.plots import Axes, new_figure, save_figure
from outpace.lab.compare import ResultRecord, pareto_indices, result_title

Results = Sequence[ResultRecord]

SPEEDS = {
    "tokens_per_forward": "tokens per forward",
    "tokens_per_cpu_second": "tokens per CPU second",
}
GREY = "#888888"


def group_by_line(results: Results) -> dict[str, list[ResultRecord]]:
    several = len({describe_load(result) for result in results}) > 1
    lines: dict[str, list[ResultRecord]] = {}
    for result in results:
        name = result.get("line") or result_title(result)
        lines.setdefault(f"{name}, {describe_load(result)}" if several else name, []).append(result)
    return lines


def describe_load(result: ResultRecord) -> str:
    length, tokens = result.get("prompt_length"), result.get("max_tokens")
    words = [f"batch {result['batch']}"]
    words += [] if length is None else [f"prompts of {length}"]
    words += [] if tokens is None else [f"{tokens} tokens"]
    return ", ".join(words)


def draw_front(results: Results, path: Path) -> None:
    """Plot accuracy against speed, with the Pareto front as a grey line.

    A second pane shows tokens per CPU second if all results have them.
    """
    keys = [key for key in SPEEDS if all(key in result for result in results)]
    figure = new_figure(6.2 * len(keys), 5.2)
    panes = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
    for pane, key in zip(panes, keys, strict=True):
        for name, line in group_by_line(results).items():
            plot_line(pane, line, key, name)
        front = [results[number] for number in pareto_indices(results, key)]
        best = sorted((result[key], 100 * (result["accuracy"] or 0)) for result in front)
        pane.plot(*zip(*best, strict=True), color=GREY, zorder=0, linewidth=4, alpha=0.25)
        pane.set_xlabel(SPEEDS[key])
        pane.grid(alpha=0.3)
        pane.margins(x=0.09)
    panes[0].set_ylabel("accuracy (%)")
    handles, labels = panes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", fontsize=7, frameon=False)
    save_figure(figure, path)


def plot_line(pane: Axes, line: Results, key: str, name: str, height: str = "accuracy") -> None:
    """Plot a line with its settings as labels; accuracy has 95 % confidence intervals."""
    scale = 100 if height == "accuracy" else 1
    x, y = [result[key] for result in line], [scale * (result[height] or 0) for result in line]
    own = [result["interval"] if height == "accuracy" else None for result in line]
    bounds = [each or (h / 100, h / 100) for each, h in zip(own, y, strict=True)]
    below = [max(h - 100 * low, 0) for h, (low, _) in zip(y, bounds, strict=True)]
    above = [max(100 * high - h, 0) for h, (_, high) in zip(y, bounds, strict=True)]
    error = f"{key}_error"
    wide = [result.get(error) or 0.0 for result in line] if error in line[0] else None
    style: dict[str, Any] = {"fmt": "o-", "capsize": 2, "markersize": 4, "linewidth": 1}
    drawn = pane.errorbar(x, y, xerr=wide, yerr=[below, above], label=name, **style)
    for result, left, top in zip(line, x, y, strict=True):
        text, colour = result.get("setting", ""), drawn.lines[0].get_color()
        pane.annotate(text, (left, top), (4, 4), textcoords="offset points", size=6, color=colour)


CLOCKED = SPEEDS | {"tokens_per_second": "tokens per second", "speedup": "times as fast"}
HEIGHTS = {
    "accuracy": "accuracy (%)",
    "acceptance_length": "acceptance length",
    "likelihood": "log-likelihood per token (nats)",
}


def draw_figure(results: Results, published: Results, title: str, path: Path) -> None:
    """Write a plot of accuracy, acceptance or likelihood against speed.

    The published points are beside it, if the paper has any with both.
    """
    key = "tokens_per_cpu_second" if results[0]["clock"] == "cpu" else "tokens_per_second"
    speed, height = axes_of(published)
    own = "likelihood" if "likelihood" in results[0] else height
    shown = [point for point in published if {speed, height} <= set(point)]
    figure = new_figure(12.4 if shown else 7.4, 5.2)
    panes = figure.subplots(1, 2 if shown else 1, squeeze=False)[0]
    for name, group in groupby(results, key=itemgetter("line")):
        plot_line(panes[0], list(group), key, name, own)
    for name in dict.fromkeys(point["setting"] for point in shown):
        line = [point for point in shown if point["setting"] == name]
        x, y = ([point[axis] for point in line] for axis in (speed, height))
        panes[1].plot(x, y, "o", fillstyle="none", label=name)
        for point in line:
            place = (point[speed], point[height])
            panes[1].annotate(differing(point), place, (4, 4), textcoords="offset points", size=6)
    names = CLOCKED[key], f"{CLOCKED[speed]}, as published"
    for pane, name, label in zip(panes, names, (HEIGHTS[own], HEIGHTS[height]), strict=False):
        pane.set_xlabel(name)
        pane.set_ylabel(label)
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
