"""Answers as HTML, for notebooks: text coloured by forward, legible on light and on dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

HUES = (200, 45, 310, 130, 20)
"""Colours of forwards, in turn; neighbours differ."""
TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"
PIECE = "background:hsla({hue},90%,50%,.28);border-bottom:2px solid hsl({hue},70%,50%)"
FIGURES = "opacity:.75;font-size:.9em;margin-top:.4em"


def coloured(pieces: Sequence[str], figures: str) -> str:
    """Pieces of text, a colour for each that is not empty, above a line of figures.

    Everything that comes from a model is escaped. The styles stand in the elements, and colours of
    the page shine through, since notebooks drop style sheets and have themes of their own.
    """
    spoken = [piece for piece in pieces if piece]
    spans = "".join(
        f'<span title="forward {number} of {len(spoken)} that brought text" '
        f'style="{PIECE.format(hue=HUES[number % len(HUES)])}">{escape(piece)}</span>'
        for number, piece in enumerate(spoken, 1)
    )
    return (
        f'<div><div style="{TEXT}">{spans}</div>'
        f'<div style="{FIGURES}">{escape(figures)}</div></div>'
    )
