"""Scoring of final numbers, by the rules of published scorers of GSM8K."""

from __future__ import annotations

import re

STRICT_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
STATED_NUMBER = re.compile(r"The answer is (-?[0-9.,]+).")
FLEXIBLE_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
PLAIN_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
NUMBER_TOLERANCE = 1e-6


def judge_strict(answer: str, reference: str) -> bool:
    """Judge the first number after `#### `: GSM8K's rule, lm-eval's `strict-match`."""
    return match_equals_reference(STRICT_NUMBER.search(answer), reference)


def judge_stated(answer: str, reference: str) -> bool:
    """Judge the first number after `The answer is `: `strict-match` of lm-eval's `gsm8k_cot`.

    As published, a character must follow the number; otherwise its last digit is lost.
    """
    return match_equals_reference(STATED_NUMBER.search(answer), reference)


def judge_flexible(answer: str, reference: str) -> bool:
    """Judge the last text that looks like a number: lm-eval's `flexible-extract`.

    As published, dots, commas and dollar signs alone count as numbers, and 72.00 is not 72.
    """
    found = None
    for found in FLEXIBLE_NUMBER.finditer(answer):  # noqa: B007
        pass
    return match_equals_reference(found, reference)


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


def match_equals_reference(found: re.Match[str] | None, reference: str) -> bool:
    """Return whether a match is the reference, by lm-eval's `exact_match` for GSM8K."""
    if found is None:
        return False
    return normalize_number(found[found.re.groups].strip()) == normalize_number(reference)


def normalize_number(number: str) -> str:
    """Return a number without commas, dollar signs, text before `#### ` and a final period."""
    number = number.replace(",", "").replace("$", "")
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", number)).lower()
