"""Slots of an answer as lines of a terminal."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from outpace.api.output import Output
from outpace.cli.draw import canvas_lines, show_pieces
from outpace.decoding import Step


@pytest.mark.parametrize(
    ("is_terminal", "shown"),
    [(True, "␛[2Ja       b\n\ufffd␇\ufffd\n"), (False, "\x1b[2Ja\tb\n\x9b\x07\x7f\n")],
)
def test_no_text_of_a_model_commands_a_terminal(is_terminal: bool, shown: str) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, color_system=None)
    show_pieces(console, ["\x1b[2J", "a\tb\n\x9b", "\x07\x7f"])
    assert file.getvalue() == shown


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
