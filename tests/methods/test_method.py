"""Properties that all methods share."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import get_type_hints

import pytest

from outpace.decoding import CAUSAL_KINDS, Kind
from outpace.methods import (
    APD,
    D2F,
    METHODS,
    Autoregressive,
    BlockDiffusion,
    LeftToRight,
    Method,
    WeDLM,
)


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_options_are_frozen_and_keyword_only(kind: type[Method]) -> None:
    assert is_dataclass(kind)
    assert all(option.kw_only for option in fields(kind))
    method = kind(**dict.fromkeys(kind.roles, "other"))
    with pytest.raises(FrozenInstanceError):
        method.anything = 1  # type: ignore[attr-defined]
    assert type(method).__name__ in repr(method)


@pytest.mark.parametrize("kind", METHODS.values(), ids=METHODS)
def test_roles_are_text_fields_that_name_models(kind: type[Method]) -> None:
    named = get_type_hints(kind)
    assert all(named[role] is str for role in kind.roles)
    method = kind(**dict.fromkeys(kind.roles, "other"))
    assert method.model_names() == dict.fromkeys(kind.roles, "other")


def test_memory_of_a_request_is_prompt_and_answer() -> None:
    assert Autoregressive().slots_needed(prompt=7, max_tokens=5) == 12


def test_methods_list_their_target_kinds() -> None:
    assert all(kind.target_kinds == (Kind.DIFFUSION,) for kind in (APD, LeftToRight))
    assert D2F.target_kinds == (Kind.DIFFUSION, Kind.BLOCK)
    assert Autoregressive.target_kinds == CAUSAL_KINDS
    assert BlockDiffusion.target_kinds == (Kind.BLOCK, Kind.CAUSAL_BLOCK)
    assert WeDLM.target_kinds == (Kind.MASK_FILLING,)
