"""Every method on the models of the zoo: accuracy, tokens per forward and speed, in one run.

    python benchmarks/methods.py --json benchmarks/results/methods.json --png docs/methods.png

Held-out story problems. Each method decodes the model that was trained for it, with settings that
cost it little accuracy; the causal model decodes token by token for comparison. `--draw` makes the
picture again from a JSON file. How it is measured: `curve.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

import curve
from curve import Point
from harness import Row
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    BlockDiffusion,
    DFlash,
    Diffusion,
    Eagle,
    FastDLLM,
    LeftToRight,
    Speculative,
    WeDLM,
)

POINTS = [
    Point("autoregressive", "", "tiny-ar", Autoregressive()),
    Point("speculative", "tiny-aux", "tiny-ar", Speculative(draft="tiny-aux", tokens=8)),
    Point("DFlash", "tiny-dflash", "tiny-ar", DFlash(draft="tiny-dflash")),
    Point("EAGLE-3", "chain", "tiny-ar", Eagle(draft="tiny-eagle", width=1)),
    Point("EAGLE-3", "16 nodes", "tiny-ar", Eagle(draft="tiny-eagle", nodes=16)),
    Point("EAGLE-3", "60 nodes", "tiny-ar", Eagle(draft="tiny-eagle")),
    Point("WeDLM", "entropy 0.4", "tiny-wedlm", WeDLM()),
    Point("WeDLM, verified", "entropy 0.8", "tiny-wedlm", WeDLM(entropy=0.8, verify=True)),
    Point("left to right", "K = 1", "tiny-dream", LeftToRight(window=16, lookahead=16)),
    Point("left to right", "K = 2", "tiny-dream", LeftToRight(tokens=2, window=16, lookahead=16)),
    Point(
        "APD", "R = 0.3", "tiny-dream", APD(verifier="tiny-aux", ratio=0.3, window=16, lookahead=16)
    ),
    Point("Fast-dLLM", "dual, 0.99", "tiny-dream", FastDLLM(block=8, threshold=0.99)),
    Point("LLaDA's order", "blocks of 8", "tiny-llada", Diffusion(block=8)),
    Point("D2F", "add 0.5, 0.98", "tiny-d2f", D2F(add=0.5, confidence=0.98)),
    Point("block diffusion", "0.98", "tiny-block", BlockDiffusion(threshold=0.98)),
    Point("block diffusion, verified", "", "tiny-block", BlockDiffusion(verify=True)),
    Point("block diffusion", "0.5, edited", "tiny-block", BlockDiffusion(threshold=0.5, edit=0.5)),
]
"""Every method on the model that was trained for it."""

PANES = {
    "tokens_per_second": ("tokens per second of CPU time", "#2166ac"),
    "tokens_per_forward": ("tokens per forward", "#92c5de"),
    "accuracy": ("problems solved (%)", "#bbbbbb"),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """A bar for each method and figure, the fastest on top."""
    rows = sorted(rows, key=lambda row: row["tokens_per_second"])
    names = [", ".join(filter(None, (row["kind"], row["setting"]))) for row in rows]
    labels = [f"{name}\n{row['model']}" for name, row in zip(names, rows, strict=True)]
    figure, panes = plt.subplots(
        1, len(PANES), figsize=(11, 0.45 * len(rows) + 1.2), sharey=True, layout="constrained"
    )
    for pane, (key, (title, colour)) in zip(panes, PANES.items(), strict=True):
        percent = key == "accuracy"
        values = [row[key] * (100 if percent else 1) for row in rows]
        errors = [100 * row["standard_error"] for row in rows] if percent else None
        bars = pane.barh(labels, values, xerr=errors, color=colour)
        figures = [f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in values]
        pane.bar_label(bars, figures, padding=3, size=8)
        pane.set_title(title, size=10)
        pane.margins(x=0.15, y=0.01)
        pane.tick_params(axis="y", labelsize=8)
        for side in ("top", "right"):
            pane.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, write and draw."""
    options = curve.arguments(__doc__).parse_args()
    rows = curve.results(options, POINTS)
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
