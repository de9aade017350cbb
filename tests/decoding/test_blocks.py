"""What a forward fills of a block: the sure holes, or the best one where it must go on."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.decoding.blocks import SIZE, taken
from outpace.decoding.forward import FloatArray
from outpace.methods import D2F
from outpace.training import objectives


def scores(*values: float) -> FloatArray:
    """Scores of as many holes."""
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("forced", [False, True])
def test_sure_holes_are_filled_together(forced: bool) -> None:
    """Whatever their rank, and whether the block must go on or not."""
    ranks = scores(9, 8, 1, 7)
    chosen = taken(scores(0.5, 0.91, 0.95, 0.9), ranks, 0.9, forced=forced)
    assert chosen.tolist() == [1, 2]


def test_without_one_the_best_by_rank_is_filled_where_a_block_must_go_on() -> None:
    """The leftmost of equals; none in a block that may wait, or that has no holes."""
    confidence, ranks = scores(0.5, 0.6, 0.4, 0.4), scores(1, 2, 3, 3)
    assert taken(confidence, ranks, 0.9, forced=True).tolist() == [2]
    assert taken(confidence, ranks, 0.9, forced=False).tolist() == []
    assert taken(scores(), scores(), 0.9, forced=True).tolist() == []


def test_training_and_decoding_begin_with_the_same_options() -> None:
    """Those that both have."""
    ours, theirs = objectives.D2F(), D2F()
    assert (ours.block, ours.confidence) == (theirs.block or SIZE, theirs.confidence)
