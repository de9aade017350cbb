"""Plain decoding, one token per forward, where a method does not draft."""

from __future__ import annotations

from collections.abc import Generator

from outpace.decoding import CAUSAL, FULL, Forward, Pattern, Prediction, Read, Request


def decode_plain(
    request: Request, start: int, read: Read, pattern: Pattern = CAUSAL, window: int | None = 1
) -> Generator[Forward, Prediction, bool]:
    """Run the text from slot `start` on and commit one token; return whether to continue.

    While the controller is paused, the next tokens follow immediately. Each forward then recomputes
    the `window` last tokens, or all of them. Causal rows of tokens that a constraint forces run
    with it.
    """
    while True:
        n, forced = len(request), request.forced_tokens if pattern == CAUSAL else []
        out = yield Forward(
            ids=request.ids[start:] + forced,
            start=start,
            pattern=pattern,
            predict=range(n, n + len(forced) + 1) if forced else None,
            read=read,
        )
        if not request.commit(out.tokens, out.logprobs):
            return False
        if not request.is_paused:
            return True
        start = 0 if window is None else max(len(request) - window, 0)
        pattern = CAUSAL if pattern == CAUSAL else FULL
