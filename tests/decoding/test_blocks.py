"""Holes of a block that a forward fills: the confident ones, or the best one."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.decoding.blocks import D2F_BLOCK_SIZE, select_block_holes
from outpace.decoding.forward import FloatArray
from outpace.methods import D2F
from outpace.training import objectives


def scores(*values: float) -> FloatArray:
    """Return scores for this many holes."""
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("forced", [False, True])
def test_confident_holes_are_filled_together(forced: bool) -> None:
    ranks = scores(9, 8, 1, 7)
    chosen = select_block_holes(scores(0.5, 0.91, 0.95, 0.9), ranks, 0.9, is_active=forced)
    assert chosen.tolist() == [1, 2]


def test_active_block_fills_best_hole() -> None:
    confidence, ranks = scores(0.5, 0.6, 0.4, 0.4), scores(1, 2, 3, 3)
    assert select_block_holes(confidence, ranks, 0.9, is_active=True).tolist() == [2]
    assert select_block_holes(confidence, ranks, 0.9, is_active=False).tolist() == []
    assert select_block_holes(scores(), scores(), 0.9, is_active=True).tolist() == []


def test_training_and_decoding_share_defaults() -> None:
    ours, theirs = objectives.D2F(), D2F()
    assert (ours.block, ours.confidence) == (theirs.block or D2F_BLOCK_SIZE, theirs.confidence)


def test_a_margin_replaces_the_threshold() -> None:
    confidence = scores(0.9, 0.7, 0.95)
    for margin, chosen in ((0.1, [2, 0, 1]), (0.6, [2, 0]), (0.8, [2]), (0.95, [])):
        found = select_block_holes(confidence, confidence, 0.0, is_active=False, margin=margin)
        assert found.tolist() == chosen
    found = select_block_holes(confidence, confidence, 0.0, is_active=True, margin=0.95)
    assert found.tolist() == [2]
