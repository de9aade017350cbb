"""One thing to ask a model, and how to tell whether the answer is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.api.text import Prompt
from outpace.evaluation.scoring import SCORERS


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, what its task knows of the answer, and the name of the rule that judges it."""

    prompt: Prompt
    reference: Any
    score: str

    def right(self, answer: str) -> bool | None:
        """By the rule; None where the question is there for speed only."""
        return SCORERS[self.score](answer, self.reference)
