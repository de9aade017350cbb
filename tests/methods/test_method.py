"""What all methods share, and the plain loops: `Autoregressive` and `LeftToRight`."""

from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from helpers import MASK, request_of, script
from outpace.decoding import CAUSAL, CAUSAL_KINDS, FULL, Kind, Request, Sampling
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
    assert method.model_names() == dict.fromkeys(kind.roles, "other")
    with pytest.raises(FrozenInstanceError):
        method.anything = 1  # type: ignore[attr-defined]


def test_methods_list_their_target_kinds() -> None:
    assert all(kind.target_kinds == (Kind.DIFFUSION,) for kind in (APD, LeftToRight))
    assert D2F.target_kinds == (Kind.DIFFUSION, Kind.BLOCK)
    assert Autoregressive.target_kinds == CAUSAL_KINDS
    assert BlockDiffusion.target_kinds == (Kind.BLOCK, Kind.CAUSAL_BLOCK)
    assert WeDLM.target_kinds == (Kind.MASK_FILLING,)


def test_autoregressive_has_one_row_per_forward() -> None:
    seq = Request(prompt=[1, 2, 3], max_tokens=3, sampling=Sampling(temperature=0.7, seed=5))
    forwards = script(Autoregressive(), seq, [[4], [5], [6]])
    assert [(list(f.ids), f.start) for f in forwards] == [([1, 2, 3], 0), ([4], 3), ([5], 4)]
    assert all(f.pattern == CAUSAL and f.visible_end is None for f in forwards)
    assert [list(f.predicted_slots()) for f in forwards] == [[3], [4], [5]]
    assert [forward.read for forward in forwards] == [seq.sample()] * 3
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 6], "length")


def test_left_to_right_runs_the_whole_canvas() -> None:
    sampling = Sampling(temperature=1.0)
    seq = request_of(prompt=[1, 2, 3], max_tokens=3, mask_id=MASK, sampling=sampling)
    forwards = script(LeftToRight(), seq, [[4], [5], [6]])
    assert [(f.start, list(f.ids), list(f.predicted_slots())) for f in forwards] == [
        (0, [1, 2, 3, MASK, MASK, MASK], [3]),
        (0, [1, 2, 3, 4, MASK, MASK], [4]),
        (0, [1, 2, 3, 4, 5, MASK], [5]),
    ]
    assert all(forward.pattern == FULL for forward in forwards)
    assert [forward.read for forward in forwards] == [seq.sample(step) for step in range(3)]


def test_window_and_lookahead_limit_the_rows() -> None:
    seq = request_of(prompt=[1, 2, 3], max_tokens=6, mask_id=MASK)
    method = LeftToRight(tokens=2, window=2, lookahead=3)
    forwards = script(method, seq, [[4, 5], [6, 7], [8, 9]])
    assert [(f.start, list(f.ids)) for f in forwards] == [
        (0, [1, 2, 3, MASK, MASK, MASK]),
        (2, [3, 4, 5, MASK, MASK, MASK]),
        (4, [5, 6, 7, MASK, MASK]),
    ]
