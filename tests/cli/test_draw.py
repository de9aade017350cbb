"""Slots of an answer as lines of a terminal."""

from __future__ import annotations

from outpace.cli.draw import CELLS, legend, slot_lines
from outpace.decoding import Step
from outpace.output import Output


def pipeline() -> Output:
    """Two blocks of three behind a prompt of as many, each filled by one forward."""
    steps = [
        Step("target", start, 6, start + 6, 3, 0.0, (3, 3), holes)
        for start, holes in ((0, (range(3, 6),)), (3, (range(6, 9),)))
    ]
    return Output(
        text="", ids=[5] * 6, finish_reason="length", steps=steps, prompt_tokens=3, seconds=1.0
    )


def test_a_line_shows_the_edges_of_blocks() -> None:
    """And loses its oldest slots where it is too long."""
    assert [line.plain for line in slot_lines(pipeline(), 20)] == ["███│", "▒▒▒│███"]
    assert [line.plain for line in slot_lines(pipeline(), 6)] == ["███│", "…▒│███"]


def test_no_forward_at_all() -> None:
    """Where no block had room."""
    none = Output(text="", ids=[], finish_reason="length", steps=[], prompt_tokens=3, seconds=0.0)
    assert list(slot_lines(none, 9)) == []


def test_the_legend_names_all_cells() -> None:
    """But for the blank."""
    assert all(cell in legend().plain for cell in CELLS if cell != " ")
