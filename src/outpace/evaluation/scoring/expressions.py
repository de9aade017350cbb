"""Answers that end in an expression, as those of MATH: as text, or by what they mean."""

from __future__ import annotations

import re
from threading import current_thread, main_thread
from typing import Any

NEXT_PROBLEM = re.compile(r"(?<!^)\n+Problem[: ]")
DROPPED = ("\n", "\\!")
RENAMED = (("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"))
IGNORED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$", "$", "\\%", "%", " ")


def boxed(answer: str, reference: str) -> bool:
    """What stands in the last `\\boxed{}`, compared as text: WeDLM's rule for MATH.

    Spaces, sizes of brackets and fractions, signs of dollars, percents and degrees, and commas
    between digits do not count. What comes after another `Problem:` is not looked at.
    """
    found = last_boxed(NEXT_PROBLEM.split(answer)[0])
    return bool(found) and normal(found or "") == normal(reference)


def equal(answer: str, reference: str) -> bool:
    """What the answer ends in, compared by its value, by the library math-verify.

    This is `math_verify` of lm-eval's MATH tasks. The reference is LaTeX, alone or in a
    `\\boxed{}`. Raises `ValueError` where the library is missing, and `RuntimeError` in another
    thread than the main one, where its time limits do not work and it would judge all wrong.
    """
    library = math_verify()
    if current_thread() is not main_thread():
        raise RuntimeError("math-verify compares expressions in the main thread only")
    if "\\boxed" not in reference:
        reference = f"\\boxed{{{reference}}}"
    return bool(library.verify(gold=library.parse(reference), target=library.parse(answer)))


def math_verify() -> Any:
    """The library that compares expressions."""
    try:
        import math_verify
    except ImportError as error:
        raise ValueError(
            f"{error}; comparing expressions needs: pip install 'outpace[evaluate]'"
        ) from error
    return math_verify


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{}`, or `\\fbox{}` where there is none; None without one."""
    for mark in ("\\boxed", "\\fbox"):
        if mark in text:
            behind = text[text.rfind(mark) + len(mark) :]
            return braced(behind) if behind.startswith("{") else None
    return None


def braced(text: str) -> str | None:
    """What stands in the braces that a text begins with; None where they are not closed."""
    depth = 0
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:end]
    return None


def normal(expression: str) -> str:
    """An expression without what does not count."""
    for mark in DROPPED:
        expression = expression.replace(mark, "")
    for mark, instead in RENAMED:
        expression = expression.replace(mark, instead)
    for mark in IGNORED:
        expression = expression.replace(mark, "")
    expression = re.sub(r"(\d),(\d)", r"\1\2", expression)
    while expression.startswith("{") and braced(expression) == expression[1:-1]:
        expression = expression[1:-1]
    return expression
