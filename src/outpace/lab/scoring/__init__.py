"""Scoring rules by name. Each follows that of a published scorer."""

import re
from collections.abc import Callable
from typing import Any

from outpace.data.numbers import judge_last_number
from outpace.lab import sandbox
from outpace.lab.scoring import code, expressions, planning

Scorer = Callable[[str, Any], bool | None]
"""Return whether an answer is correct for a reference; None if it cannot be judged."""


def judge_exact(answer: str, reference: str) -> bool:
    return answer.strip() == reference


def judge_regex(answer: str, reference: str) -> bool:
    return re.search(reference, answer) is not None


def judge_nothing(answer: str, reference: object) -> None:
    """Judge nothing; for prompts that only measure speed."""


SCORERS: dict[str, Scorer] = {
    "countdown": planning.judge_countdown,
    "equal": expressions.judge_math_verify,
    "exact": judge_exact,
    "flexible": expressions.judge_flexible,
    "humaneval": code.judge_humaneval,
    "humaneval-completion": code.judge_humaneval_completion,
    "last-number": judge_last_number,
    "mbpp": code.judge_mbpp_instruct,
    "mbpp-done": code.judge_mbpp_few_shot,
    "none": judge_nothing,
    "regex": judge_regex,
    "sheet": planning.judge_sudoku_sheet,
    "strict": expressions.judge_strict,
    "sudoku": planning.judge_sudoku,
}

NEEDED: dict[str, Callable[[], object]] = {
    "equal": expressions.import_math_verify,
    **dict.fromkeys(
        ("humaneval", "humaneval-completion", "mbpp", "mbpp-done"), sandbox.check_sandbox
    ),
}
"""Functions that raise if a rule cannot judge on this machine, called before answering."""

__all__ = ["NEEDED", "SCORERS", "Scorer"]
