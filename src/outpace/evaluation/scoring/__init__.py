"""Scoring rules by name. Each follows that of a published scorer."""

import re
from collections.abc import Callable
from typing import Any

from outpace.evaluation import sandbox
from outpace.evaluation.scoring import code, expressions, numbers, planning

Scorer = Callable[[str, Any], bool | None]
"""Return whether an answer is correct for a reference; None if it cannot be judged."""


def exact(answer: str, reference: str) -> bool:
    """Compare the whole text, without surrounding white space."""
    return answer.strip() == reference


def matched(answer: str, reference: str) -> bool:
    """Search for a regular expression in the text."""
    return re.search(reference, answer) is not None


def unscored(answer: str, reference: object) -> None:
    """Judge nothing; for prompts that only measure speed."""


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
"""Functions that raise if a rule cannot judge on this machine, called before answering."""

__all__ = ["NEEDED", "SCORERS", "Scorer"]
