"""A question to a model, and the rule that judges its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outpace.api.text import Prompt
from outpace.evaluation.scoring import SCORERS


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, the reference for its answer, and the name of the scoring rule."""

    prompt: Prompt
    reference: Any
    score: str

    def judge_answer(self, answer: str) -> bool | None:
        """Return whether an answer is correct; None for questions without a rule."""
        return SCORERS[self.score](answer, self.reference)
