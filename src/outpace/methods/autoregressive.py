"""Autoregressive decoding, one token per forward: the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.decoding import Decoding, Forward, Request
from outpace.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Method):
    """Run the last token, sample the next one; tokens forced by a constraint run with it."""

    @property
    def is_resumable(self) -> bool:
        return True

    def decode(self, request: Request) -> Decoding:
        """Prefill, then one row per forward, and one for each forced token."""
        read, start, alive = request.sample(), 0, True
        while alive:
            n, forced = len(request), request.forced_tokens
            out = yield Forward(
                ids=request.ids[start:] + forced,
                start=start,
                predict=range(n, n + len(forced) + 1) if forced else None,
                read=read,
            )
            start = n + len(forced)
            alive = request.commit(out.tokens, out.logprobs)
