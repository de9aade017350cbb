"""Scoring of final numbers, by the rules of published scorers of GSM8K."""

from __future__ import annotations

import re

STRICT = re.compile(r"#### (-?[0-9.,]+)")
STATED = re.compile(r"The answer is (-?[0-9.,]+).")
FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
PLAIN = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
CLOSE = 1e-6


def strict(answer: str, reference: str) -> bool:
    """Judge the first number after `#### `: GSM8K's rule, lm-eval's `strict-match`."""
    return matches(STRICT.search(answer), reference)


def stated(answer: str, reference: str) -> bool:
    """Judge the first number after `The answer is `: `strict-match` of lm-eval's `gsm8k_cot`.

    As published, a character must follow the number; otherwise its last digit is lost.
    """
    return matches(STATED.search(answer), reference)


def flexible(answer: str, reference: str) -> bool:
    """Judge the last text that looks like a number: lm-eval's `flexible-extract`.

    As published, dots, commas and dollar signs alone count as numbers, and 72.00 is not 72.
    """
    found = None
    for found in FLEXIBLE.finditer(answer):  # noqa: B007
        pass
    return matches(found, reference)


def last_number(answer: str, reference: str) -> bool:
    """Judge the first number after the last `####`, else the last number: WeDLM's rule.

    Text after another `Question:` is ignored; numbers are equal up to 1e-6.
    """
    found = final(answer.partition("Question:")[0])
    return found is not None and abs(float(found) - float(reference.replace(",", ""))) < CLOSE


def final(text: str) -> str | None:
    """Return the first number after the last `####`, else the last number of the text."""
    text = text.replace(",", "")
    _, marked, tail = text.rpartition("####")
    numbers = PLAIN.findall(tail)[:1] if marked else []
    numbers = numbers or PLAIN.findall(text)[-1:]
    return numbers[0] if numbers else None


def matches(found: re.Match[str] | None, reference: str) -> bool:
    """Return whether a match is the reference, by lm-eval's `exact_match` for GSM8K."""
    if found is None:
        return False
    return normal(found[found.re.groups].strip()) == normal(reference)


def normal(number: str) -> str:
    """Return a number without commas, dollar signs, text before `#### ` and a final period."""
    number = number.replace(",", "").replace("$", "")
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", number)).lower()
