"""Blocks of a DFlash draft: the forward that fills one, and a tree of what it predicts."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from outpace.decoding import FULL, Forward, Prediction, Request
from outpace.decoding.branches import DraftTree


def grow_tree(out: Prediction, width: int) -> DraftTree:
    """Return a tree of the tokens of a block, with a level for each predicted slot."""
    assert out.logits is not None
    drafted = DraftTree(width)
    for logits in out.logits:
        if not drafted.beam:
            break
        drafted.add_level((), logits.expand(len(drafted.beam), -1))
    return drafted


def draft_block(request: Request, features: Tensor, rows: int) -> Forward:
    """Return a forward of `rows` rows, the last committed token and masks, after `features`.

    A DFlash draft reads the features `[c, f]` of the previous slots as context. A fused one
    combines them with the tokens of these slots, which are causal rows; the block has no features.
    """
    start, num_features = len(request) - 1, features.shape[0]
    block = [request.ids[start]] + [request.target.mask_id] * (rows - 1)
    if not request.target.adds_features:
        return Forward(ids=block, start=start, pattern=FULL, model="draft", context=features)
    return Forward(
        ids=[*request.ids[start - num_features : start], *block],
        start=start - num_features,
        pattern=(*(1,) * num_features, rows),
        model="draft",
        features=F.pad(features, (0, 0, 0, rows)),
    )
