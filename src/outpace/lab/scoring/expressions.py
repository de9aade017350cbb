"""Scoring of numbers (GSM8K) and mathematical expressions (MATH): as text, or by value."""

from __future__ import annotations

import re
from threading import current_thread, main_thread
from typing import Any

from outpace.errors import install_extra

STRICT_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
FLEXIBLE_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


def judge_strict(answer: str, reference: str) -> bool:
    """Judge the first number after `#### `: GSM8K's rule, lm-eval's `strict-match`."""
    return match_equals_reference(STRICT_NUMBER.search(answer), reference)


def judge_flexible(answer: str, reference: str) -> bool:
    """Judge the last text that looks like a number: lm-eval's `flexible-extract`.

    As published, dots, commas and dollar signs alone count as numbers, and 72.00 is not 72.
    """
    found = None
    for found in FLEXIBLE_NUMBER.finditer(answer):  # noqa: B007
        pass
    return match_equals_reference(found, reference)


def match_equals_reference(found: re.Match[str] | None, reference: str) -> bool:
    """Return whether a match is the reference, by lm-eval's `exact_match` for GSM8K."""
    if found is None:
        return False
    return normalize_number(found[found.re.groups].strip()) == normalize_number(reference)


def normalize_number(number: str) -> str:
    """Return a number without commas, dollar signs, text before `#### ` and a final period."""
    number = number.replace(",", "").replace("$", "")
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", number)).lower()


def judge_math_verify(answer: str, reference: str) -> bool:
    r"""Compare the final expression by value with math-verify, as lm-eval's `math_verify` does.

    The reference is LaTeX, alone or in a `\boxed{}`.
    """
    library = import_math_verify()
    if current_thread() is not main_thread():
        raise RuntimeError("math-verify compares expressions in the main thread only")
    if "\\boxed" not in reference:
        reference = f"\\boxed{{{reference}}}"
    return bool(library.verify(gold=library.parse(reference), target=library.parse(answer)))


def import_math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ValueError(f"{error}; comparing expressions {install_extra('evaluate')}") from error
    return math_verify


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}`, or `\fbox{}` without one; None without both."""
    for mark in ("\\boxed", "\\fbox"):
        if mark in text:
            rest = text[text.rfind(mark) + len(mark) :]
            return braced_prefix(rest) if rest.startswith("{") else None
    return None


def braced_prefix(text: str) -> str | None:
    """Return the content of the braces that begin a string; None if they are not closed."""
    depth = 0
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:end]
    return None
