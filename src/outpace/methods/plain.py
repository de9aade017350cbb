"""A cycle that proposes nothing: the last token says the next one."""

from __future__ import annotations

from collections.abc import Generator

from outpace.decoding import CAUSAL, Forward, Pattern, Prediction, Read, Request


def plain(
    request: Request, start: int, read: Read, pattern: Pattern = CAUSAL
) -> Generator[Forward, Prediction, bool]:
    """Feed the text from slot `start` on and commit one token; whether to go on."""
    out = yield Forward(ids=request.ids[start:], start=start, pattern=pattern, read=read)
    return request.commit(out.tokens, out.logprobs)
