"""Number of accepted drafts, rejection sampling, and the accepted path of a tree."""

import pytest
import torch
from torch import Tensor

from helpers import chi_square
from outpace.decoding import Sample, Sampling, agreement
from outpace.decoding.accept import Rejection
from outpace.decoding.tree import DraftTree, accepted_path

CPU, DRAWS = torch.device("cpu"), 20_000
SLOTS = range(0, 2 * DRAWS, 2)


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


def verify(drafted: Tensor, p: Tensor, q: Tensor, sampling: Sampling) -> Tensor:
    """Return the first two tokens `[draws, 2]` of many reads of one draft each."""
    reads = [
        Rejection(drafted=(token,), guess=q.log()[None], sampling=sampling)
        for token in drafted.tolist()
    ]
    slots = [range(slot, slot + 2) for slot in SLOTS]
    reader = Rejection.make_reader(reads, slots, CPU)
    logits = p.log().expand(2 * len(reads), -1)
    return reader(logits, slice(0, len(logits))).tokens.view(-1, 2)


@pytest.mark.parametrize("top_k", [None, 3])
def test_rejection_gives_the_law_of_the_target(top_k: int | None) -> None:
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    kept_p, kept_q = p.clone(), q.clone()
    if top_k:
        kept_p[3] = kept_q[0] = 0
    kept_p, kept_q = kept_p / kept_p.sum(), kept_q / kept_q.sum()
    sampling = Sampling(temperature=1.0, top_k=top_k, seed=1)
    # As a draft draws, with the noise of step 1 at the same slots.
    draft = Sample.make_reader([Sample(sampling=sampling, step=1)], [SLOTS], CPU)
    drafted = draft(q.log().expand(DRAWS, -1), slice(0, DRAWS)).tokens
    tokens = verify(drafted, p, q, sampling)
    assert chi_square(tokens[:, 0], kept_p) > 1e-3
    assert chi_square(tokens[:, 1], kept_p) > 1e-3
    accepted = float((tokens[:, 0] == drafted).float().mean())
    assert accepted == pytest.approx(float(torch.minimum(kept_p, kept_q).sum()), abs=0.02)


def test_rejected_draft_is_replaced_from_the_residual() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.8, 0.1])
    drafted = torch.ones(DRAWS, dtype=torch.long)
    tokens = verify(drafted, p, q, Sampling(temperature=1.0))[:, 0]
    # Token 1 is accepted by p / q = 3 / 8; p - q is positive for 0.4 and 0.1.
    law = torch.tensor([5 / 8 * 4 / 5, 3 / 8, 5 / 8 * 1 / 5])
    assert chi_square(tokens, law) > 1e-3


def test_accepted_path_follows_the_predictions() -> None:
    parents, tokens = [-1, 0, 0, 1, 2, 3], [5, 6, 7, 7, 8]
    assert accepted_path(parents, tokens, [6, 0, 7, 0, 9, 0]) == [0, 2, 4]
    assert accepted_path(parents, tokens, [5, 7, 0, 8, 0, 9]) == [0, 1, 3, 5]
    assert accepted_path(parents, tokens, [7, 0, 0, 0, 0, 0]) == [0]


def test_tree_grows_by_summed_probability() -> None:
    tree = DraftTree(2)
    assert tree.add_level([], torch.tensor([[0.6, 0.4, 0.0]]).log()) == [0, 0]
    assert tree.ancestor_masks() == (0, 0)
    level = torch.tensor([[0.55, 0.0, 0.45], [0.9, 0.1, 0.0]]).log()
    assert tree.add_level([], level) == [1, 0]  # 0.36 after token 1, 0.33 after token 0
    assert tree.ancestor_masks() == (0b10, 0b01)
    assert (tree.tokens, tree.parents) == ([0, 1, 0, 2, 0, 1], [-1, -1, 0, 0, 1, 1])
    assert tree.best_nodes(4) == [0, 1, 2, 4] and tree.path(4) == [1, 0]
    assert tree.parent_rows([0, 1, 4]) == [-1, 0, 0, 2]
