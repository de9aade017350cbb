"""Thoughts in the terminal."""

from __future__ import annotations

from itertools import pairwise

from rich.text import Text

from outpace.api.parts import AnswerFormat
from outpace.cli.draw import AnswerPainter
from outpace.constraint.thoughts import THOUGHT_FORMATS


def test_thoughts_are_dim_and_apart() -> None:
    answer = "<think>\nHm\x1b, 7\n</think>\n\nSo 8.\n9"
    for at in range(len(answer)):
        painter, shown = AnswerPainter(AnswerFormat(THOUGHT_FORMATS[0])), Text()
        for begin, end in pairwise([0, at, len(answer)]):
            shown.append_text(painter.paint(answer[begin:end], final=end == len(answer)))
        assert shown.plain == "Hm\u241b, 7\n\nSo 8.\n9"
        dim = {place for a, b, s in shown.spans if s == "dim" for place in range(a, b)}
        bright = {p for a, b, s in shown.spans if "not dim" in str(s) for p in range(a, b)}
        assert dim - bright == set(range(6)), at
