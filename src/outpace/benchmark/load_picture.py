"""Throughput and latency against load, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter
except ImportError as error:
    raise ValueError(f"{error}; pictures need: pip install 'outpace[plot]'") from error

from outpace.benchmark.load_figures import Figures

NAMES = {"concurrency": "concurrent streams", "rate": "requests per second sent"}
LATENCIES = {
    "ttft_ms": ("time to first text", "#d95f0e"),
    "gap_ms": ("gap between events", "#2166ac"),
    "tpot_ms": ("time per output token", "#4dac26"),
    "e2e_ms": ("whole answer", "#666666"),
}
STYLES = {"p50": "-", "p99": ":"}


def draw_levels(levels: Sequence[Figures], title: str, path: Path) -> None:
    """Write a picture of the figures of several levels, in the order of their load."""
    name = "rate" if "rate" in levels[0] else "concurrency"
    levels = sorted(levels, key=lambda level: level[name])
    load = [level[name] for level in levels]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    rates = [level["tokens_per_second"] or 0 for level in levels]
    throughput.plot(load, rates, "-o", color="#2166ac", markersize=4)
    throughput.set_ylabel("output tokens per second")
    throughput.set_ylim(bottom=0)
    for key, (label, colour) in LATENCIES.items():
        for percentile, style in STYLES.items():
            latency.plot(
                load,
                [level[key][percentile] if level[key] else math.nan for level in levels],
                style + "o",
                color=colour,
                markersize=3,
                label=f"{label}, {percentile}",
            )
    latency.set_yscale("log")
    latency.set_ylabel("milliseconds")
    figure.legend(loc="outside lower center", fontsize=7, ncols=len(LATENCIES))
    for pane in (throughput, latency):
        frame(pane, name, load)
    figure.suptitle(title, fontsize=10)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150, format="png")


def frame(pane: Axes, name: str, load: Sequence[float]) -> None:
    """What stands around the lines of a pane."""
    pane.set_xscale("log", base=2)
    pane.set_xticks(load)
    pane.xaxis.set_major_formatter(ScalarFormatter())
    pane.set_xlabel(NAMES[name])
    pane.grid(alpha=0.3)
