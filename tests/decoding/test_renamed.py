"""Old names of public attributes still work, and warn where they are used."""

from __future__ import annotations

import pytest

from outpace.decoding import Decoding, Request, Target
from outpace.methods import Method


def test_old_names_work_and_warn() -> None:
    with pytest.warns(FutureWarning, match="is_block_causal"):
        assert Target(is_block_causal=True).blocked  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning, match="slots_needed"):

        class Longer(Method):
            def slots(self, prompt: int, max_tokens: int) -> int:
                return 7

            def decode(self, request: Request) -> Decoding:
                raise NotImplementedError

    assert Longer().slots_needed(1, 2) == 7
