"""One thing to ask a model, and how to tell whether the answer is right."""

from __future__ import annotations

import re
from dataclasses import dataclass

FINAL = re.compile(r"#### (-?[0-9.,]+)")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the result that its answer must end in."""

    prompt: str
    final: str

    def right(self, answer: str) -> bool:
        """GSM8K's rule: the first number behind `####`, without commas, is the reference."""
        return final_number(answer) == self.final


@dataclass(frozen=True, slots=True)
class Exact(Question):
    """A prompt whose answer must be `final` to the letter; white space around it is free."""

    def right(self, answer: str) -> bool:
        """Equality of the whole text."""
        return answer.strip() == self.final


def final_number(text: str) -> str | None:
    """The number behind the first `####`, without commas; None where there is none."""
    found = FINAL.search(text)
    return found[1].replace(",", "").removesuffix(".") if found else None
