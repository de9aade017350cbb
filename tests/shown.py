"""What documentation and examples show, and whether it is right."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ANSWERS = {
    "At the zoo 3 birds": "15",
    "Lily plays 4 games": "26",
    "Lily reads 2 pages": "46",
    "Omar counts 60 people": "64",
    "Tom picks 4 baskets": "19",
}
"""How the questions begin that are shown, and their answers."""


def blocks(path: Path, language: str) -> list[str]:
    """Fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def is_right(shown: str, printed: str) -> bool:
    """Whether the questions that are shown got their answers, and no other."""
    given = set(re.findall(r"#### (\d+)", printed.replace("|", "")))
    return given == {answer for question, answer in ANSWERS.items() if question in shown}
