"""What documentation, examples and terminals show: whether it is right, and legible."""

import re
from collections.abc import Iterable
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
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def is_right(shown: str, printed: str) -> bool:
    """Whether the questions that are shown got their answers, and no other."""
    given = set(re.findall(r"#### (\d+)", printed.replace("|", "")))
    return given == {answer for question, answer in ANSWERS.items() if question in shown}


def contrast(one: Iterable[float], other: Iterable[float]) -> float:
    """Of two colours, parts from 0 to 1, as WCAG 2.1 counts it."""
    lights = []
    for parts in (one, other):
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        lights.append(sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(lights) + 0.05) / (min(lights) + 0.05)
