"""Slots of an answer as lines of a terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.color import Color

from outpace.cli.draw import CELLS, COLOURS, canvases, coloured, legend, slot_lines
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


@pytest.mark.parametrize("name", COLOURS)
def test_colours_are_legible_on_white_and_on_black(name: str) -> None:
    """By the contrast of WCAG 2.1, of which large text needs 3 and its smallest print 4.5."""
    parts = [part / 255 for part in Color.parse(name).get_truecolor()]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    light = sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    assert min(1.05 / (light + 0.05), (light + 0.05) / 0.05) > 3.7


def test_no_text_of_a_model_commands_the_terminal() -> None:
    """Such as to clear it, or to rename its window; lines and tabs stay."""
    (piece,) = coloured(["\x1b[2Ja\tb\n\x9b\x07\x7f"])
    assert piece.plain == "␛[2Ja\tb\n\ufffd␇\ufffd"


def test_what_is_new_is_in_sight() -> None:
    """However much stands in front of it, and however narrow the terminal is."""
    llm: Any = SimpleNamespace(text=SimpleNamespace(tokenizer=None))
    steps = [Step("target", 2, 1, 3, 3, 0.0, "causal") for _ in range(9)]
    output = Output(
        text="",
        ids=[*range(100, 127)],
        finish_reason="length",
        steps=steps,
        prompt_tokens=3,
        seconds=1,
    )
    for width in (20, 36, 80):
        for index, line in enumerate(canvases(llm, output, width)):
            line.truncate(width, overflow="ellipsis")
            assert " ".join(str(100 + 3 * index + n) for n in range(3)) in line.plain
