"""Problems from a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.evaluation.tasks.gsm8k import gsm8k

GOOD = json.dumps({"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"})


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """JSON may hold other characters at which Python splits lines."""
    path = tmp_path / "test.jsonl"
    path.write_text(GOOD.replace("+", "\u2028") + "\n" + GOOD + "\n", encoding="utf-8")
    assert [question.final for question in gsm8k(9, str(path))] == ["7", "7"]
    assert gsm8k(1, str(path))[0].prompt == "What is 3 \u2028 4?"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "test.jsonl:2 is not JSON"),
        ("5", "test.jsonl:2 must be an object, not int"),
        ("[" * 100_000, "test.jsonl:2 is not JSON"),
        ('{"answer": "#### 7"}', "test.jsonl:2 needs a text as question, not None"),
        ('{"question": "", "answer": "#### 7"}', "test.jsonl:2 needs a text as question, not ''"),
        ('{"question": "?"}', "test.jsonl:2 needs a text as answer, not None"),
        ('{"question": "?", "answer": 7}', "test.jsonl:2 needs a text as answer, not 7"),
        ('{"question": "?", "answer": "7"}', "test.jsonl:2 needs a number behind ####"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    """With its file and its field."""
    path = tmp_path / "test.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ValueError, match=says):
        gsm8k(9, str(path))
    assert len(gsm8k(1, str(path))) == 1


def test_a_file_is_needed(tmp_path: Path) -> None:
    """It is not part of this package."""
    for path in (None, str(tmp_path)):
        with pytest.raises(ValueError, match="no GSM8K file at"):
            gsm8k(1, path)
