"""How many drafted tokens are kept."""

from __future__ import annotations

from collections.abc import Sequence


def agreement(drafted: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the leading run in which two token lists agree."""
    for index, (draft, token) in enumerate(zip(drafted, tokens, strict=False)):
        if draft != token:
            return index
    return min(len(drafted), len(tokens))
