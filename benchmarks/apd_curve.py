"""Accuracy against speed of APD and of fixed-K decoding on `tiny-dream`: numbers and picture.

    python benchmarks/apd_curve.py --json benchmarks/results/apd-curve.json \
        --png docs/apd-curve.png

All settings use the same window and lookahead, but for the two without a cache, which feed every
token and every mask again. `--draw` makes the picture again from a JSON file. How it is measured:
`curve.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

import curve
from curve import Point
from harness import Row
from outpace.methods import APD, Autoregressive, LeftToRight

RATIOS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
FIXED = (1, 2, 4, 8)
STYLES = {
    "fixed K": ("#b2182b", "s"),
    "APD": ("#2166ac", "o"),
    "fixed K, no cache": ("#ef8a62", "s"),
    "APD, no cache": ("#67a9cf", "o"),
    "autoregressive (tiny-ar)": ("#444444", "D"),
}
LABELS = {"R=0.0": "R=0 … 0.5", "R=0.1": "", "R=0.3": "", "R=0.5": ""}
"""Of points that lie too close together to be named each."""


def settings(options: argparse.Namespace) -> list[Point]:
    """All points, the baseline first."""

    def fixed(tokens: int, kind: str, window: int | None, lookahead: int | None) -> Point:
        method = LeftToRight(tokens=tokens, window=window, lookahead=lookahead)
        return Point(kind, f"K={tokens}", "tiny-dream", method)

    def apd(ratio: float, kind: str, window: int | None, lookahead: int | None) -> Point:
        method = APD(verifier="tiny-aux", ratio=ratio, window=window, lookahead=lookahead)
        return Point(kind, f"R={ratio}", "tiny-dream", method)

    near = options.window, options.lookahead
    return [
        Point("autoregressive (tiny-ar)", "", "tiny-ar", Autoregressive()),
        *(fixed(tokens, "fixed K", *near) for tokens in FIXED),
        *(apd(ratio, "APD", *near) for ratio in RATIOS),
        fixed(1, "fixed K, no cache", None, None),
        apd(0.5, "APD, no cache", None, None),
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against tokens per forward and against tokens per second."""

    def lines(pane: Axes, key: str) -> None:
        for kind, (color, marker) in STYLES.items():
            line = [
                {**row, "setting": LABELS.get(row["setting"], row["setting"])}
                for row in rows
                if row["kind"] == kind
            ]
            curve.plot(pane, line, key, label=kind, color=color, marker=marker)

    title = "tiny-dream: adaptive parallel decoding against fixed K, one at a time, CPU"
    curve.picture(path, title, lines, "lower left")


def main() -> None:
    """Measure, write and draw."""
    parser = curve.arguments(__doc__)
    parser.add_argument("--window", type=int, default=16, help="rows fed again (16)")
    parser.add_argument("--lookahead", type=int, default=16, help="masks seen (16)")
    options = parser.parse_args()
    rows = curve.results(options, settings(options))
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()
