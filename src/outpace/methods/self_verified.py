"""Self-verified decoding of block diffusion models (S2D2).

"S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation" (Han et al., 2026): a
block diffusion model is autoregressive in blocks of one token, so it can verify what it drafts as a
block of masks. Here every token is verified, and keys are those of blocks of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from outpace.decoding import Decoding, Forward, Prediction, Read, Request, Tree, agreement
from outpace.decoding.target import Rank
from outpace.decoding.tree import MAX_TREE_SLOTS


def decode_verified(request: Request, size: int, threshold: float | None) -> Decoding:
    """Draft a block of `size` masks at a time, and verify its leading tokens above `threshold`.

    Each forward verifies the last draft, and drafts what follows if all of it is right.
    """
    scores: tuple[Rank, ...] = () if threshold is None else ("confidence",)
    read = request.sample(scores=scores, score_as_drawn=True)
    make_forward = forward_of_rows if request.target.shift else forward_of_masks
    ready, alive, drafted = 0, True, list[int]()  # ready: slots that hold the text
    while alive:
        n, first = len(request), len(drafted) + 1
        out = yield make_forward(request, ready, drafted, size, read)
        accepted = agreement(drafted, out.tokens)
        alive, ready = request.commit(out.tokens[: accepted + 1], out.logprobs), n + accepted
        count = count_certain(out, first, threshold) if accepted == len(drafted) else 0
        room = request.limit - len(request) - 1
        if not request.target.shift:  # each draft has a mask that verifies it
            room = min(room // 2, MAX_TREE_SLOTS)
        drafted = out.tokens[first : first + min(count, room)]


def forward_of_rows(
    request: Request, ready: int, drafted: Sequence[int], size: int, read: Read
) -> Forward:
    """Return a forward of the text and the drafts in blocks of one token, then a block of masks.

    In a model of shift 1 the rows of tokens verify, and those of masks draft: the next slots, or
    with a `mask_shift` of 0 their own, of which the first is that of the verified token.
    """
    n, last = len(request), len(request) + len(drafted)
    end, own = min(last + size, request.limit), request.target.mask_shift == 0
    count = end - 1 - last
    masks = [request.target.mask_id] * (count + (own and count > 0))
    tokens = [*request.ids[ready:], *drafted]
    return Forward(
        ids=[*tokens, *masks],
        start=ready,
        pattern=(*repeat(1, len(tokens)), *[len(masks)] * bool(masks)),
        predict=range(n, end),
        predict_from=[*range(n - 1, last), *range(last + 1, end)] if own else None,
        read=read,
    )


def forward_of_masks(
    request: Request, ready: int, drafted: Sequence[int], size: int, read: Read
) -> Forward:
    """Return a forward of the drafts, a block of masks after them, and masks in blocks of one.

    In a model of shift 0 the last masks verify: each sees the text, the drafts before its slot, and
    itself. The prompt runs with one of them only, since a tree cannot be split.
    """
    n, count, mask = len(request), len(drafted), request.target.mask_id
    if ready < n - 1:
        ids = [*request.ids[ready:], mask]
        pattern = (1,) * len(ids)
        return Forward(ids=ids, start=ready, pattern=pattern, predict=[n], read=read)
    last = n + count
    width = min(size, request.limit - last - count - 1, MAX_TREE_SLOTS - count)
    width = width if width > 1 else 0  # the first mask has the slot that is verified last
    chain = [(1 << index) - 1 for index in range(count + 1)]
    block = [(1 << count + width) - 1] * width
    first = last + width  # slot of the first mask that verifies
    return Forward(
        ids=[*request.ids[ready:], *drafted, *[mask] * (width + count + 1)],
        start=ready,
        pattern=Tree(n, (*chain[:count], *block, *chain)),
        positions=[*range(ready, first), *range(n, last + 1)],
        predict=range(n, last + max(width, 1)),
        predict_from=[*range(first, first + count + 1), *range(last + 1, first)],
        read=read,
        branches=[
            *(drafted[:index] for index in range(count + 1)),
            *([*drafted, *[mask] * index] for index in range(1, width)),
        ],
    )


def count_certain(out: Prediction, first: int, threshold: float | None) -> int:
    """Return how many entries from `first` on are above the threshold, up to one that is not."""
    if threshold is None:
        return len(out.tokens) - first
    unsure = np.flatnonzero(out.scores["confidence"][first:] <= threshold)
    return int(unsure[0]) if len(unsure) else len(out.tokens) - first
