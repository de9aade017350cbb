"""The final number of an answer."""

from __future__ import annotations

import re

PLAIN_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
NUMBER_TOLERANCE = 1e-6


def judge_last_number(answer: str, reference: str) -> bool:
    """Judge the first number after the last `####`, else the last number: WeDLM's rule.

    Text after another `Question:` is ignored; numbers are equal up to 1e-6.
    """
    found = final_number(answer.partition("Question:")[0])
    return (
        found is not None
        and abs(float(found) - float(reference.replace(",", ""))) < NUMBER_TOLERANCE
    )


def final_number(text: str) -> str | None:
    """Return the first number after the last `####`, else the last number of the text."""
    text = text.replace(",", "")
    _, marked, tail = text.rpartition("####")
    numbers = PLAIN_NUMBER.findall(tail)[:1] if marked else []
    numbers = numbers or PLAIN_NUMBER.findall(text)[-1:]
    return numbers[0] if numbers else None
