"""One token per forward: the baseline of everything else."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.decoding import Decoding, Forward, Request
from outpace.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Method):
    """Feed the last token, read the next one."""

    def decode(self, request: Request) -> Decoding:
        """Prefill, then one row per forward."""
        read = request.sample()
        out = yield Forward(ids=request.ids, start=0, read=read)
        while request.commit(out.tokens, out.logprobs):
            out = yield Forward(ids=request.ids[-1:], start=len(request) - 1, read=read)
