"""Answers as HTML for notebooks, with a different colour for each forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

PIECE_HUES = (200, 45, 310, 130, 20)
"""Hues of successive forwards, in degrees; neighbours differ."""
TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7"
PIECE_STYLE = "background:hsla({hue},90%,50%,.28);border-bottom:2px solid hsl({hue},70%,50%)"
FIGURES_STYLE = "opacity:.75;font-size:.9em;margin-top:.4em"


def render_html(pieces: Sequence[str], figures: str) -> str:
    """Render pieces of text, one colour per non-empty piece, above a line of figures.

    All model output is escaped. Styles are inline and translucent: notebooks drop style sheets and
    have their own themes.
    """
    shown = [piece for piece in pieces if piece]
    spans = "".join(
        f'<span title="forward {number} of {len(shown)} that committed text" '
        f'style="{PIECE_STYLE.format(hue=PIECE_HUES[number % len(PIECE_HUES)])}">'
        f"{escape(piece)}</span>"
        for number, piece in enumerate(shown, 1)
    )
    return (
        f'<div><div style="{TEXT_STYLE}">{spans}</div>'
        f'<div style="{FIGURES_STYLE}">{escape(figures)}</div></div>'
    )
