"""The block of masks that a DFlash draft fills, with the features of its target."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from outpace.decoding import FULL, Forward, Request


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
