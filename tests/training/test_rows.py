"""Tests of packing: documents are concatenated and their ranges shifted."""

import pytest
import torch

from outpace.attention.ranges import causal_ranges, full_ranges
from outpace.training.rows import Rows, pack_documents


def document(ids: list[int], ranges: torch.Tensor) -> Rows:
    """Rows whose labels are their ids and a hundred."""
    size = len(ids)
    labels = torch.tensor(ids) + 100
    return Rows(
        torch.tensor(ids), torch.arange(size), ranges, labels, torch.ones(size), float(size)
    )


def test_documents_are_sorted_by_length_and_their_ranges_moved() -> None:
    packed = pack_documents(
        [document([1, 2, 3], full_ranges(3)), document([4, 5], causal_ranges(2))]
    )
    assert packed.ids.tolist() == [4, 5, 1, 2, 3]
    assert packed.positions.tolist() == [0, 1, 0, 1, 2]
    assert packed.ranges[:, 0].tolist() == [[0, 1], [0, 2], [2, 5], [2, 5], [2, 5]]
    assert packed.labels.tolist() == [104, 105, 101, 102, 103]
    assert packed.normaliser == 5


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        pack_documents([])
