"""Number of accepted drafts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.decoding import agreement

TOKENS = st.lists(st.integers(0, 3), max_size=8)


@pytest.mark.parametrize(
    ("drafted", "tokens", "kept"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [1], 0),
    ],
)
def test_leading_run_that_agrees(drafted: list[int], tokens: list[int], kept: int) -> None:
    assert agreement(drafted, tokens) == kept


@given(TOKENS, TOKENS)
def test_agreement_is_longest_common_prefix(drafted: list[int], tokens: list[int]) -> None:
    kept = agreement(drafted, tokens)
    assert drafted[:kept] == tokens[:kept]
    assert kept == min(len(drafted), len(tokens)) or drafted[kept] != tokens[kept]
