"""Orders: which holes are chosen, in which order, and at ties."""

from __future__ import annotations

import numpy as np

from outpace.decoding import Prediction
from outpace.decoding.order import above, best, rank, ranked

SCORES = np.array([0.2, 0.9, 0.5, 0.9], dtype=np.float32)


def test_ranked_prefers_the_left_one_of_equals() -> None:
    assert ranked(SCORES).tolist() == [1, 3, 2, 0]


def test_best_takes_as_many_as_there_are() -> None:
    assert best(SCORES).tolist() == [1]
    assert best(SCORES, 3).tolist() == [1, 3, 2]
    assert sorted(best(SCORES, 9)) == [0, 1, 2, 3]


def test_above_is_strict() -> None:
    assert above(SCORES, 0.5).tolist() == [1, 3]
    assert above(SCORES, 0.9).tolist() == []


def test_rank_prefers_little_entropy() -> None:
    out = Prediction(tokens=[1, 2], confidence=SCORES[:2], entropy=SCORES[2:])
    assert rank(out, "confidence").tolist() == SCORES[:2].tolist()
    assert ranked(rank(out, "entropy")).tolist() == [0, 1]
