"""Speculative decoding: a small model drafts, the target verifies in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from outpace.decoding import (
    CAUSAL_KINDS,
    Decoding,
    Forward,
    Request,
    Verify,
    agreement,
    draft_read,
    verify_read,
)
from outpace.methods.loose import FLY_ENTROPY, FLY_WINDOW, check_fly
from outpace.methods.method import Length, Method, Within, check_length

LONGEST = 8
"""Most tokens that "auto" drafts."""


@dataclass(frozen=True, kw_only=True)
class Speculative(Method):
    """Draft with a small model token by token, verify in one pass (Leviathan et al., 2023).

    Lossless, but for verify="fly": what comes out follows the target alone. `tokens` are drafted at
    a time; "auto" takes as many as pay, or none. `verify` keeps a draft where the target, sampled
    with the request's own noise, says the same (the output is the autoregressive one of the same
    seed), or by rejection sampling (of the same law). With "fly" a draft stays also where the
    target says another token, if it is in doubt there (`fly_entropy`, in nats, over its three
    likeliest tokens) and says the `fly_window` drafts behind.
    """

    roles = {"draft": CAUSAL_KINDS}

    draft: str
    tokens: Annotated[Length, Within(1, LONGEST)] = "auto"
    verify: Verify = "match"
    fly_window: int = FLY_WINDOW
    fly_entropy: float = FLY_ENTROPY

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.tokens, self.verify)
        check_fly(self.verify, self.fly_window, self.fly_entropy, self.tokens)

    @property
    def adaptive(self) -> bool:
        """Whether it wants `request.pace` to know what passes take."""
        return self.tokens == "auto"

    def decode(self, request: Request) -> Decoding:
        """Draft some tokens, keep those that the target agrees with and its next one."""
        out = yield Forward(ids=request.ids, start=0, read=request.sample())
        alive, ready = (
            request.commit(out.tokens, out.logprobs),
            0,
        )  # ready: draft slots that hold output
        while alive:
            n = len(request)
            drafted: list[int] = []
            guesses: list[Tensor | None] = []
            # The noise of the target makes the draft say the same more often than none does.
            read = draft_read(request, self.verify, match=request.sample())
            count = request.limit - n - 1
            if self.tokens == "auto":
                count = request.pace.length(min(count, LONGEST), rows=1, once=False)
            else:
                count = min(count, self.tokens)
            while len(drafted) < count:
                tail = (request.ids + drafted)[ready:]
                out = yield Forward(ids=tail, start=ready, read=read, model="draft")
                ready += len(tail)
                drafted += out.tokens
                guesses.append(out.logits)
            out = yield Forward(
                ids=[request.ids[-1], *drafted],
                start=n - 1,
                predict=range(n, n + count + 1),
                read=verify_read(
                    request, self.verify, drafted, guesses, fly=(self.fly_window, self.fly_entropy)
                ),
            )
            kept = agreement(drafted, out.tokens)
            request.pace.verified(count, kept)
            ready = min(ready, n + kept)
            alive = request.commit(out.tokens[: kept + 1], out.logprobs)
