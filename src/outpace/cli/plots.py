"""Pictures: the slots of one answer."""

from __future__ import annotations

from pathlib import Path

from outpace.api.output import STATE_NAMES, Output, block_edges, slot_states
from outpace.errors import install_extra

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ValueError(f"{error}; a plot {install_extra('plot')}") from error

__all__ = ["Axes", "draw_slots", "new_figure", "save_figure"]

STATE_COLOURS = ("white", "#e3e3e3", "#d95f0e", "#74a9cf", "#023858")
CELL = 0.085
"""Size of a slot in inches."""


def draw_slots(output: Output, title: str, path: Path) -> None:
    """Plot the state of each slot after each forward, with lines at block edges."""
    states = slot_states(output)
    forwards, slots = states.shape
    width, height = max(slots * CELL, 5.5) + 0.9, max(forwards * 1.6 * CELL, 1.2) + 1.5
    figure = new_figure(width, height)
    pane = figure.add_subplot()
    pane.imshow(
        states,
        cmap=ListedColormap(STATE_COLOURS),
        vmin=0,
        vmax=len(STATE_COLOURS) - 1,
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
        for colour, state in list(zip(STATE_COLOURS, STATE_NAMES, strict=True))[1:]
    ]
    figure.legend(handles=patches, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG file, regardless of the path's suffix."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150, format="png")
