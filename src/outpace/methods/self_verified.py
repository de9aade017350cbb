"""Self-verified decoding of block diffusion models (S2D2).

"S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation" (Han et al., 2026): a
block diffusion model is autoregressive in blocks of one token, so it can verify what it drafts as a
block of masks. Here every token is verified, and keys are those of blocks of one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import repeat

import numpy as np

from outpace.decoding import Decoding, Forward, Prediction, Read, Request, Tree, agreement
from outpace.decoding.target import Rank
from outpace.decoding.tree import MAX_TREE_SLOTS

MAX_DRAFTED_TOKENS = MAX_TREE_SLOTS
"""Most drafted tokens, since the masks that verify them see them by tree bits."""


def decode_verified(request: Request, size: int, threshold: float | None) -> Decoding:
    """Draft `size` masks at a time, of which the leading ones above `threshold` are verified.

    In a model of shift 1, rows of tokens verify, and one forward verifies and drafts what follows.
    """
    scores: tuple[Rank, ...] = () if threshold is None else ("confidence",)
    ready, alive, drafted = 0, True, list[int]()  # ready: slots that hold the text
    if not request.target.shift:
        yield from decode_unshifted(request, size, threshold, scores)
        return
    read = request.sample(scores=scores, score_as_drawn=True)
    while alive:
        n, last = len(request), len(request) + len(drafted)
        end = min(last + size, request.limit)
        tokens, masks = (
            [*request.ids[ready:], *drafted],
            [request.target.mask_id] * (end - 1 - last),
        )
        out = yield Forward(
            ids=[*tokens, *masks],
            start=ready,
            pattern=(*repeat(1, len(tokens)), *[len(masks)] * bool(masks)),
            predict=range(n, end),
            read=read,
        )
        accepted = agreement(drafted, out.tokens)
        alive, ready = request.commit(out.tokens[: accepted + 1], out.logprobs), n + accepted
        is_valid, first = accepted == len(drafted), len(drafted) + 1
        count = count_sure(out, first, threshold) if is_valid else 0
        drafted = out.tokens[first : first + min(count, request.limit - len(request) - 1)]


def decode_unshifted(
    request: Request, size: int, threshold: float | None, scores: tuple[Rank, ...]
) -> Decoding:
    """Draft in one forward, verify in another, which has a mask for each slot.

    Drafts shorten near the limit, so that the masks that verify them need no further slots.
    """
    ready, alive, read = 0, True, request.sample()
    draft_read = request.sample(scores=scores, score_as_drawn=True, joint=True)
    while alive:
        n = len(request)
        count = min(size, max((request.limit - n - 1) // 2, 1), MAX_DRAFTED_TOKENS)
        masks = [request.target.mask_id] * count
        out = yield Forward(
            ids=[*request.ids[ready:], *masks],
            start=ready,
            pattern=(*repeat(1, n - ready), count),
            predict=range(n, n + count),
            read=draft_read,
        )
        if count == 1:  # a block of one token
            alive = request.commit(out.tokens, out.logprobs)
        else:
            drafted = out.tokens[: max(count_sure(out, 0, threshold), 1)]
            alive = yield from verify_masked(request, drafted, read)
        ready = len(request) - 1


def verify_masked(
    request: Request, drafted: Sequence[int], read: Read
) -> Generator[Forward, Prediction, bool]:
    """Verify drafted tokens after the cached text by masks in blocks of one; return if it goes on.

    A mask sees the text and the drafts before its slot. The masks follow the drafts, whose keys are
    final if they are accepted.
    """
    n, size = len(request), len(drafted)
    tree = Tree.from_parents(n, [*range(-1, size - 1), *range(-1, size)])
    out = yield Forward(
        ids=[*drafted, *[request.target.mask_id] * (size + 1)],
        start=n,
        pattern=tree,
        positions=tree.positions(n),
        predict=range(n, n + size + 1),
        predict_from=range(n + size, n + 2 * size + 1),
        read=read,
        branches=[drafted[:index] for index in range(size + 1)],
    )
    return request.commit(out.tokens[: agreement(drafted, out.tokens) + 1], out.logprobs)


def count_sure(out: Prediction, first: int, threshold: float | None) -> int:
    """Return how many entries from `first` on are above the threshold, up to one that is not."""
    if threshold is None:
        return len(out.tokens) - first
    unsure = np.flatnonzero(out.scores["confidence"][first:] <= threshold)
    return int(unsure[0]) if len(unsure) else len(out.tokens) - first
