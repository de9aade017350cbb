"""Decoding of causal models that fill a block after the last token, from left to right (SDLM).

"Sequential Diffusion Language Models" (Liu et al., 2025): the last token and the masks after it see
one another and each predicts the next slot; the longest sure prefix of the predictions is accepted.
"""

from __future__ import annotations

from itertools import repeat

from outpace.decoding import Decoding, Forward, OptionError, Request
from outpace.methods.self_verified import count_certain

PREFIX_UNUSED = ("budget", "steps", "order", "part", "canvas", "rule", "lookahead")
"""Options of the other ways to fill a block."""


def check_no_template(request: Request) -> None:
    """Raise `OptionError` for a template or suffix, which such a block does not see."""
    if request.is_infill:
        message = (
            "method: the model predicts from left to right, so it cannot fill a template or the "
            "text before a suffix: omit it"
        )
        raise OptionError("method", "BlockDiffusion", message)


def decode_prefixes(request: Request, size: int, threshold: float | None) -> Decoding:
    """Predict `size` tokens at a time, and accept the leading ones above `threshold`.

    At least one is; with `threshold=None` exactly one. Each forward runs the tokens that the one
    before accepted again, for causal keys.
    """
    ready, alive = 0, True  # ready: slots with final keys
    while alive:
        n, end = len(request), min(len(request) + size, request.limit)
        masks = [request.target.mask_id] * (end - n - 1)
        read = request.sample(scores=("confidence",), score_as_drawn=True, joint=True)
        out = yield Forward(
            ids=[*request.ids[ready:], *masks],
            start=ready,
            pattern=(*repeat(1, n - 1 - ready), 1 + len(masks)),
            predict=range(n, end),
            read=read,
        )
        accepted = 1 if threshold is None else max(count_certain(out, 0, threshold), 1)
        alive, ready = request.commit(out.tokens[:accepted], out.logprobs), n - 1
