"""Answers of earlier requests, for methods that copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SharedAnswers(Protocol):
    """Answers of earlier requests to a model, all of them from one thread at a time."""

    def add_answer(self, ids: Sequence[int]) -> None:
        """Add the tokens of an answer."""

    def find_copy(self, ids: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed the end of a text elsewhere."""
