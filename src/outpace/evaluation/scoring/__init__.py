"""How answers are judged, by name; written by hand. Each rule is that of a published scorer."""

import re
from collections.abc import Callable
from typing import Any

from outpace.evaluation import sandbox
from outpace.evaluation.scoring import code, expressions, numbers, planning

Scorer = Callable[[str, Any], bool | None]
"""Whether an answer is right, given what its task knows of it; None where nobody can say."""


def exact(answer: str, reference: str) -> bool:
    """The whole text to the letter; white space around it is free."""
    return answer.strip() == reference


def matched(answer: str, reference: str) -> bool:
    """A regular expression that matches somewhere in the text."""
    return re.search(reference, answer) is not None


def unscored(answer: str, reference: object) -> None:
    """Prompts that are there for speed only."""


SCORERS: dict[str, Scorer] = {
    "boxed": expressions.boxed,
    "countdown": planning.countdown,
    "equal": expressions.equal,
    "exact": exact,
    "flexible": numbers.flexible,
    "humaneval": code.humaneval,
    "humaneval-completion": code.completion,
    "last-number": numbers.last_number,
    "mbpp": code.fenced,
    "mbpp-done": code.done,
    "none": unscored,
    "regex": matched,
    "sheet": planning.sheet,
    "stated": numbers.stated,
    "strict": numbers.strict,
    "sudoku": planning.sudoku,
}

NEEDED: dict[str, Callable[[], object]] = {
    "equal": expressions.math_verify,
    **dict.fromkeys(("humaneval", "humaneval-completion", "mbpp", "mbpp-done"), sandbox.needed),
}
"""What raises where a rule cannot judge on this machine, before there is an answer to lose."""

__all__ = ["NEEDED", "SCORERS", "Scorer"]
