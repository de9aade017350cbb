"""A cycle that proposes nothing: the last token says the next one."""

from __future__ import annotations

from collections.abc import Generator

from outpace.decoding import Forward, Prediction, Read, Request


def plain(
    request: Request, start: int, read: Read, features_for: str | None = None
) -> Generator[Forward, Prediction, tuple[Prediction, bool]]:
    """Feed the text from slot `start` on and commit one token: what came back, whether to go on.

    The hidden states of what is fed may be wanted for a draft, `features_for`.
    """
    out = yield Forward(ids=request.ids[start:], start=start, read=read, features_for=features_for)
    return out, request.commit(out.tokens, out.logprobs)
