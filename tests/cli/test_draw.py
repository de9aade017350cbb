"""Slots of an answer as lines of a terminal."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from rich.color import Color
from rich.console import Console

from outpace.api.output import Output
from outpace.cli.draw import (
    STATE_CELLS,
    STEP_COLOURS,
    canvas_lines,
    cell_legend,
    colour_pieces,
    show_pieces,
    slot_lines,
    step_colour,
)
from outpace.decoding import Step
from shown import contrast


def pipeline() -> Output:
    """Return two blocks of three after a prompt of three, each filled by one forward."""
    steps = [
        Step("target", start, 6, start + 6, 3, 0.0, (3, 3), holes)
        for start, holes in ((0, (range(3, 6),)), (3, (range(6, 9),)))
    ]
    return Output(
        text="", ids=[5] * 6, finish_reason="length", steps=steps, prompt_tokens=3, seconds=1.0
    )


def test_a_line_shows_the_edges_of_blocks() -> None:
    assert [line.plain for line in slot_lines(pipeline(), 20)] == ["███│", "▒▒▒│███"]
    assert [line.plain for line in slot_lines(pipeline(), 6)] == ["███│", "…▒│███"]


def test_no_forward_at_all() -> None:
    none = Output(text="", ids=[], finish_reason="length", steps=[], prompt_tokens=3, seconds=0.0)
    assert list(slot_lines(none, 9)) == []


def test_the_legend_names_all_cells() -> None:
    assert all(cell in cell_legend().plain for cell in STATE_CELLS if cell != " ")


@pytest.mark.parametrize("name", STEP_COLOURS)
def test_colours_are_legible_on_white_and_on_black(name: str) -> None:
    assert worst(name) > 3.7


USUAL = {
    "xterm": "000000 cd0000 00cd00 cdcd00 0000ee cd00cd 00cdcd e5e5e5 "
    "7f7f7f ff0000 00ff00 ffff00 5c5cff ff00ff 00ffff ffffff",
    "Linux": "000000 aa0000 00aa00 aa5500 0000aa aa00aa 00aaaa aaaaaa "
    "555555 ff5555 55ff55 ffff55 5555ff ff55ff 55ffff ffffff",
    "macOS": "000000 990000 00a600 999900 0000b2 b200b2 00a6b2 bfbfbf "
    "666666 e60000 00d900 e5e500 0000ff e500e5 00e5e5 e5e5e5",
    "Windows": "0c0c0c c50f1f 13a10e c19c00 0037da 881798 3a96dd cccccc "
    "767676 e74856 16c60c f9f1a5 3b78ff b4009e 61d6d6 f2f2f2",
    "GNOME": "2e3436 cc0000 4e9a06 c4a000 3465a4 75507b 06989a d3d7cf "
    "555753 ef2929 8ae234 fce94f 729fcf ad7fa8 34e2e2 eeeeec",
}
"""Colours 0 to 15 as terminals mix them."""


def worst(name: str) -> float:
    """Return the lower contrast of a colour on white and on black."""
    parts = [part / 255 for part in Color.parse(name).get_truecolor()]
    return min(contrast(parts, (1, 1, 1)), contrast(parts, (0, 0, 0)))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A terminal with 16 colours."""
    made = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False, width=80
    )
    monkeypatch.setattr("outpace.cli.draw.console", made)
    return made


def test_sixteen_colours_are_legible_however_they_are_mixed(few: Console) -> None:
    show_pieces(few, (f"piece {number} " for number in range(9)))
    few.print(*slot_lines(pipeline(), 20), cell_legend())
    written = few.file.getvalue()  # type: ignore[attr-defined]
    codes = {
        int(code) for codes in re.findall(r"\x1b\[([\d;]+)m", written) for code in codes.split(";")
    }
    numbers = {code - (30 if code < 90 else 82) for code in codes - {0, 1, 2}}
    assert len(numbers) == 3
    for mixed in (palette.split() for palette in USUAL.values()):
        assert min(worst(f"#{mixed[number]}") for number in numbers) > 2.4


def test_neighbours_differ_in_few_colours_as_in_many(few: Console) -> None:
    named = [step_colour(step) for step in range(9)]
    assert all(one != other for one, other in pairwise(named))
    assert not set(named) & set(STEP_COLOURS)


def test_no_text_of_a_model_commands_the_terminal() -> None:
    (piece,) = colour_pieces(["\x1b[2Ja\tb\n\x9b\x07\x7f"])
    assert piece.plain == "␛[2Ja\tb\n\ufffd␇\ufffd"


def test_what_is_new_is_in_sight() -> None:
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
        for index, line in enumerate(canvas_lines(llm, output, width)):
            line.truncate(width, overflow="ellipsis")
            assert " ".join(str(100 + 3 * index + n) for n in range(3)) in line.plain
