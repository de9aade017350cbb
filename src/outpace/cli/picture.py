"""The picture of a trace: slots by forwards of the target."""

from __future__ import annotations

from pathlib import Path

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ValueError(f"{error}; pictures need: pip install 'outpace[plot]'") from error

from outpace.api.output import Output
from outpace.api.trace import STATES, block_edges, slot_states

COLOURS = ("white", "#e3e3e3", "#d95f0e", "#74a9cf", "#023858")
CELL = 0.085
"""Inches of a slot."""


def draw_slots(output: Output, title: str, path: Path) -> None:
    """Write a picture of what became of each slot in each forward; edges of blocks are lines."""
    states = slot_states(output)
    forwards, slots = states.shape
    width, height = max(slots * CELL, 5.5) + 0.9, max(forwards * 1.6 * CELL, 1.2) + 1.5
    figure = Figure(figsize=(width, height), layout="constrained")
    pane = figure.add_subplot()
    pane.imshow(
        states,
        cmap=ListedColormap(COLOURS),
        vmin=0,
        vmax=len(COLOURS) - 1,
        aspect="auto",
        interpolation="nearest",
        extent=(0, slots, forwards + 0.5, 0.5),
    )
    for edge in block_edges(output):
        pane.axvline(edge, color="black", linewidth=0.8)
    pane.set_xlabel("slot of the answer")
    pane.set_ylabel("forward")
    pane.yaxis.set_major_locator(MaxNLocator(integer=True))
    pane.set_title(title, size=9, loc="left", wrap=True)
    patches = [
        Patch(facecolor=colour, edgecolor="#aaaaaa", label=state)
        for colour, state in list(zip(COLOURS, STATES, strict=True))[1:]
    ]
    figure.legend(handles=patches, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150, format="png")
