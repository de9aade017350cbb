"""Answers as blocks, in pieces of any length."""

from __future__ import annotations

import pytest

from outpace.api.parts import AnswerFormat
from outpace.constraint.thoughts import THOUGHT_FORMATS
from outpace.server.blocks import BlockParser

TEXT = "<think>so</think>yes"


@pytest.mark.parametrize("cut", range(len(TEXT) + 1))
def test_only_the_final_end_is_the_last(cut: int) -> None:
    parser = BlockParser(AnswerFormat(thoughts=THOUGHT_FORMATS[0]))
    changes = [*parser.feed(TEXT[:cut], final=False), *parser.feed(TEXT[cut:], final=True)]
    ends = [(change.block.kind, change.is_last) for change in changes if change.change == "end"]
    assert ends == [("thoughts", False), ("text", True)]
    assert [block.text for block in parser.blocks] == ["so", "yes"]
