"""Accuracy against speed of APD and of fixed-k decoding on `tiny-dream`: numbers and picture.

    python benchmarks/apd_curve.py --limit 500 --json benchmarks/results/apd-curve.json \
        --png docs/apd-curve.png

Each setting solves the same held-out story problems one at a time, greedily, on the CPU. Settings
are run in turn over slices of the problems, so that a slow minute of the machine falls on all of
them alike; figures are pooled over the slices. All use the same window and lookahead, but for the
two named uncached, which feed every token and every mask again. `--draw` makes the picture again
from the JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.progress import Progress

from outpace import LLM
from outpace.cli.draw import report_table
from outpace.evaluation.run import Report, evaluate, questions_of
from outpace.evaluation.tasks import Question
from outpace.methods import APD, Autoregressive, LeftToRight, Method
from outpace.provenance import provenance

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SLICE = 50
RATIOS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
FIXED = (1, 2, 4, 8)
HIDDEN = ("R=0.1", "R=0.3", "R=0.5", "AR", "K=1 uncached", "R=0.5 uncached")
LABELS = {"R=0.0": "R=0 … 0.5", **dict.fromkeys(HIDDEN, "")}


def settings(window: int, lookahead: int) -> dict[str, tuple[str, Method]]:
    """Model and method of each point, by name."""
    limits = {"window": window, "lookahead": lookahead}
    whole = {"window": None, "lookahead": None}
    entries: dict[str, tuple[str, Method]] = {"AR": ("tiny-ar", Autoregressive())}
    for tokens in FIXED:
        entries[f"K={tokens}"] = ("tiny-dream", LeftToRight(tokens=tokens, **limits))
    for ratio in RATIOS:
        entries[f"R={ratio}"] = ("tiny-dream", APD(verifier="tiny-aux", ratio=ratio, **limits))
    entries["K=1 uncached"] = ("tiny-dream", LeftToRight(**whole))
    entries["R=0.5 uncached"] = ("tiny-dream", APD(verifier="tiny-aux", ratio=0.5, **whole))
    return entries


def measure(
    entries: dict[str, tuple[str, Method]], questions: Sequence[Question], temperature: float
) -> dict[str, Report]:
    """Run all settings in turn over slices of the questions."""
    llms = {model: LLM(model, prefix_cache=False) for model, _ in entries.values()}
    reports: dict[str, Report] = {}
    with Progress() as bars:
        bar = bars.add_task("slices", total=len(entries) * -(-len(questions) // SLICE))
        for first in range(0, len(questions), SLICE):
            for name, (model, method) in entries.items():
                part = evaluate(
                    llms[model],
                    list(questions[first : first + SLICE]),
                    task="story",
                    method=method,
                    max_tokens=128,
                    temperature=temperature,
                )
                whole = reports.setdefault(name, part)
                if whole is not part:
                    whole.outputs += part.outputs
                    whole.correct += part.correct
                    whole.seconds += part.seconds
                bars.advance(bar)
    return reports


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy against tokens per forward and against tokens per second."""
    figure, panes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    axes = (
        ("tokens_per_forward", "tokens per forward"),
        ("tokens_per_second", "tokens per second"),
    )
    for pane, (key, label) in zip(panes, axes, strict=True):
        for prefix, cached, title, style in (
            ("K=", True, "fixed K", {"color": "#b2182b", "marker": "s"}),
            ("R=", True, "APD", {"color": "#2166ac", "marker": "o"}),
            ("K=", False, "fixed K, no cache", {"color": "#ef8a62", "marker": "s"}),
            ("R=", False, "APD, no cache", {"color": "#67a9cf", "marker": "o"}),
            ("AR", True, "autoregressive (tiny-ar)", {"color": "#444444", "marker": "D"}),
        ):
            points = [
                r
                for r in results
                if r["name"].startswith(prefix) and ("uncached" in r["name"]) != cached
            ]
            x, y = [p[key] for p in points], [100 * p["accuracy"] for p in points]
            errors = [100 * p["standard_error"] for p in points]
            pane.errorbar(x, y, yerr=errors, label=title, markersize=5, capsize=2, **style)
            for point, left, height in zip(points, x, y, strict=True):
                short = LABELS.get(point["name"], point["name"].split()[0])
                pane.annotate(short, (left, height), (4, 4), textcoords="offset points", size=7)
        pane.set_xlabel(label)
        pane.grid(alpha=0.3)
        pane.margins(x=0.09)
    panes[0].set_ylabel("accuracy on held-out story problems (%)")
    panes[0].legend(fontsize=8, loc="lower left")
    figure.suptitle("tiny-dream: adaptive parallel decoding against fixed k, one at a time, CPU")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--lookahead", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--draw", action="store_true", help="only draw what the JSON holds")
    options = parser.parse_args()
    if not options.draw:
        torch.set_num_threads(options.threads)
        entries = settings(options.window, options.lookahead)
        questions = questions_of("story", options.limit)
        reports = measure(entries, questions, options.temperature)
        Console().print(report_table(reports.items(), scored=True))
        results = [{"name": name, **report.summary()} for name, report in reports.items()]
        text = json.dumps({"provenance": provenance(), "results": results}, indent=2)
        options.json.write_text(text + "\n")
    if options.png:
        draw(json.loads(options.json.read_text())["results"], options.png)


if __name__ == "__main__":
    main()
