"""Answers that end in a number, judged as published scorers of GSM8K judge them."""

from __future__ import annotations

import re

STRICT = re.compile(r"#### (-?[0-9.,]+)")
STATED = re.compile(r"The answer is (-?[0-9.,]+).")
FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
PLAIN = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
CLOSE = 1e-6


def strict(answer: str, reference: str) -> bool:
    """The first number behind `#### `: GSM8K's own rule, `strict-match` of lm-eval's `gsm8k`."""
    return matches(STRICT.search(answer), reference)


def stated(answer: str, reference: str) -> bool:
    """The first number behind `The answer is `: `strict-match` of lm-eval's `gsm8k_cot`.

    As published, a character must follow the number; where none does, its last digit is lost.
    """
    return matches(STATED.search(answer), reference)


def flexible(answer: str, reference: str) -> bool:
    """The last thing that looks like a number: `flexible-extract` of lm-eval.

    As published, dots, commas and dollars alone look like one too, and 72.00 is not 72.
    """
    found = None
    for found in FLEXIBLE.finditer(answer):  # noqa: B007
        pass
    return matches(found, reference)


def last_number(answer: str, reference: str) -> bool:
    """WeDLM's rule: the first number behind the last `####`, else the last number of all.

    What comes after another `Question:` is not looked at; numbers are equal to 1e-6.
    """
    found = final(answer.partition("Question:")[0])
    return found is not None and abs(float(found) - float(reference.replace(",", ""))) < CLOSE


def final(text: str) -> str | None:
    """The number that a text ends in: the first behind its last `####`, else the last of all."""
    text = text.replace(",", "")
    _, marked, tail = text.rpartition("####")
    found = PLAIN.findall(tail)[:1] if marked else []
    found = found or PLAIN.findall(text)[-1:]
    return found[0] if found else None


def matches(found: re.Match[str] | None, reference: str) -> bool:
    """Whether what was found is the reference, by lm-eval's `exact_match` for GSM8K."""
    if found is None:
        return False
    return normal(found[found.re.groups].strip()) == normal(reference)


def normal(number: str) -> str:
    """A number without commas, dollars, what stands before `#### `, and a full stop at its end."""
    number = number.replace(",", "").replace("$", "")
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", number)).lower()
