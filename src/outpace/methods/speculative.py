"""Speculative decoding: a small model drafts, the target verifies in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from outpace.decoding import (
    CAUSAL_KINDS,
    Decoding,
    Forward,
    LengthRange,
    Request,
    Target,
    Verify,
    draft_read,
    verify_read,
)
from outpace.decoding.draft_length import MAX_PACED_TOKENS
from outpace.methods.copies import CopyFinder, LookupOption, verify_chain
from outpace.methods.method import DraftLength, Method, check_length, decode_plain

MAX_DRAFT_TOKENS = 8
"""Most tokens that "auto" drafts."""


@dataclass(frozen=True, kw_only=True)
class Speculative(Method):
    """Draft with a small model token by token, verify in one pass (Leviathan et al., 2023).

    Lossless: the output follows the target's distribution. `tokens` are
    drafted at a time; "auto" uses the measured optimum, which may be 0. With verify="match" a draft
    is accepted if the target, sampled with the request's noise, chooses the same token; the output
    is the autoregressive one of the same seed. With "rejection" the output has the same
    distribution.
    """

    roles = {"draft": CAUSAL_KINDS}

    draft: Annotated[str, "name or folder of the draft"]
    tokens: Annotated[
        DraftLength, "tokens drafted at a time: a number, or the measured optimum, up to 8"
    ] = "auto"
    verify: Annotated[Verify, "rule by which a draft is accepted"] = "match"
    lookup: LookupOption = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.tokens, self.verify)

    @property
    def cycle_limit(self) -> int:
        """Most tokens of a cycle, including the one after the drafts."""
        return 1 + (MAX_DRAFT_TOKENS if self.tokens == "auto" else self.tokens)

    def length_range(self, target: Target, *, auto: bool) -> LengthRange | None:
        if self.verify != "match" or not (auto or self.tokens == "auto"):
            return None
        return LengthRange(
            values=range(1, min(self.cycle_limit, MAX_PACED_TOKENS) + 1),
            passes=lambda n, _: [
                ("draft", 2, n > 1),
                ("draft", 1, max(n - 2, 0)),
                ("target", n, 1),
            ],
        )

    @property
    def is_resumable(self) -> bool:
        return self.verify == "match"

    def decode(self, request: Request) -> Decoding:
        """Draft some tokens, accept those that agree with the target and its next one."""
        target_read = request.sample()
        # With the target's noise the draft agrees more often than with greedy drafts.
        draft_sample = draft_read(request, self.verify, match=target_read)
        alive = yield from decode_plain(request, 0, target_read)
        copies = self.lookup and CopyFinder(1)
        ready = 0  # slots in the draft's cache that hold the text
        while alive:
            n = len(request)
            drafted: list[int] = []
            guesses: list[Tensor | None] = []
            count = (
                request.choose_length(min(self.cycle_limit, request.limit - n), unread=n - ready)
                - 1
            )
            if copies and (copied := copies.replace_draft(request, count)):
                alive = yield from verify_chain(request, copied, target_read)
                continue
            if not count:
                alive = yield from decode_plain(request, n - 1, target_read)
                continue
            while len(drafted) < count:
                tail = (request.ids + drafted)[ready:]
                out = yield Forward(ids=tail, start=ready, read=draft_sample, model="draft")
                ready += len(tail)
                drafted += out.tokens
                guesses.append(out.logits)
            alive = yield from verify_chain(
                request, drafted, verify_read(request, self.verify, drafted, guesses)
            )
            ready = min(ready, len(request) - 1)
