"""A block behind the text, as a draft is fed it with the features of its target."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from outpace.decoding import FULL, Forward, Request


def behind(request: Request, features: Tensor, rows: int) -> Forward:
    """So many rows, the last known token and masks, behind features `[c, f]` of the slots before.

    A draft that reads features has them as context. One that adds them is fed their tokens, each
    of which sees those before it; where nothing is known, there is nothing to add.
    """
    start, count = len(request) - 1, features.shape[0]
    block = [request.ids[start]] + [request.target.mask_id] * (rows - 1)
    if not request.target.adding:
        return Forward(ids=block, start=start, pattern=FULL, model="draft", context=features)
    return Forward(
        ids=[*request.ids[start - count : start], *block],
        start=start - count,
        pattern=(*(1,) * count, rows),
        model="draft",
        features=F.pad(features, (0, 0, 0, rows)),
    )
