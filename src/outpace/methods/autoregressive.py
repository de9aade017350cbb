"""One token a forward: the baseline of everything else."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.decoding import Decoding, Forward, Sequence
from outpace.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Method):
    """Feed the last token, read the next one."""

    def decode(self, seq: Sequence) -> Decoding:
        """Prefill, then one row a forward."""
        read = seq.read()
        out = yield Forward(ids=seq.ids, start=0, read=read)
        while seq.commit(out.tokens):
            out = yield Forward(ids=seq.ids[-1:], start=len(seq) - 1, read=read)
