"""DFlash: a draft that reads the target's hidden states proposes a block in one pass."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.decoding import (
    FULL,
    GREEDY,
    Decoding,
    Forward,
    Sequence,
    Verify,
    agreement,
    draft_read,
    verify_read,
)
from outpace.methods.method import Length, Method, at_least_one, check_length, one_of


@dataclass(frozen=True, kw_only=True)
class DFlash(Method):
    """Draft a block in one pass from the target's features, verify it in another.

    "DFlash: Block Diffusion for Flash Speculative Decoding" (Chen et al., 2026, section 3).
    Lossless: what comes out follows the target alone. `block` is the last known token and the
    drafts behind it (the trained length where None), of which `tokens` are verified: a number, or
    with "auto" as many as pay, or none. `verify` is as in `Speculative`.
    """

    roles = ("draft",)
    feature_roles = ("draft",)

    draft: str
    block: int | None = None
    tokens: Length = "auto"
    verify: Verify = "match"

    def __post_init__(self) -> None:
        at_least_one(block=self.block)
        one_of(verify=(self.verify, Verify))
        check_length(self.tokens, self.verify)

    @property
    def adaptive(self) -> bool:
        """Whether it wants `seq.pace` to know what passes take."""
        return self.tokens == "auto"

    def decode(self, seq: Sequence) -> Decoding:
        """Fill a block of masks behind the last token, keep what the target agrees with."""
        block = self.block or seq.block
        if block > seq.block:
            warnings.warn(
                f"block {block} is longer than the {seq.block} that {self.draft} was trained for",
                stacklevel=2,
            )
        out = yield Forward(ids=seq.ids, start=0, read=seq.read(), features="draft")
        assert out.features is not None
        features, alive = [out.features], seq.commit(out.tokens)
        while alive:
            n = len(seq)
            drafted: list[int] = []
            guesses: list[Tensor | None] = []
            rows = min(block, seq.limit - n)
            if self.tokens == "auto":
                count = seq.pace.length(rows - 1, rows=rows, once=True)
            else:
                count = min(rows - 1, self.tokens)
            if count:
                out = yield Forward(
                    ids=[seq.ids[-1]] + [seq.mask_id] * (rows - 1),
                    start=n - 1,
                    mask=FULL,
                    predict=range(n, n + count),
                    # Masks know nothing of each other's noise: the likeliest tokens fit best.
                    read=draft_read(seq, self.verify, match=GREEDY),
                    model="draft",
                    context=torch.cat(features),
                )
                drafted, guesses, features = out.tokens, [out.logits], []
            out = yield Forward(
                ids=[seq.ids[-1], *drafted],
                start=n - 1,
                predict=range(n, n + count + 1),
                read=verify_read(seq, self.verify, drafted, guesses),
                features="draft",
            )
            kept = agreement(drafted, out.tokens)
            seq.pace.verified(count, kept)
            assert out.features is not None
            features.append(out.features[: kept + 1])
            alive = seq.commit(out.tokens[: kept + 1])
