"""One token per forward: the baseline of everything else."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.decoding import Decoding, Forward, Request
from outpace.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Method):
    """Feed the last token, read the next one; what a constraint forces is fed along with it."""

    def decode(self, request: Request) -> Decoding:
        """Prefill, then one row per forward, and one for each token that is forced."""
        read, fed, alive = request.sample(), 0, True
        while alive:
            n, forced = len(request), request.forced
            out = yield Forward(
                ids=request.ids[fed:] + forced,
                start=fed,
                predict=range(n, n + len(forced) + 1) if forced else None,
                read=read,
            )
            fed = n + len(forced)
            alive = request.commit(out.tokens, out.logprobs)
