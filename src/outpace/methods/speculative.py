"""Speculative decoding: a small model drafts, the target verifies in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from outpace.decoding import (
    CAUSAL_KINDS,
    Decoding,
    Dial,
    Forward,
    Request,
    Target,
    Verify,
    agreement,
    draft_read,
    verify_read,
)
from outpace.decoding.dial import MOST
from outpace.methods.loose import FLY_ENTROPY, FLY_WINDOW, FlyEntropy, FlyWindow, check_fly
from outpace.methods.method import Length, Method, Within, check_length
from outpace.methods.plain import plain

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

    draft: Annotated[str, "name or folder of the draft"]
    tokens: Annotated[
        Length,
        Within(1, LONGEST),
        "tokens drafted at a time: a number, or as many (8 at most) as pay",
    ] = "auto"
    verify: Annotated[Verify, "how a draft is kept"] = "match"
    fly_window: FlyWindow = FLY_WINDOW
    fly_entropy: FlyEntropy = FLY_ENTROPY

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.tokens, self.verify)
        check_fly(self.verify, self.fly_window, self.fly_entropy, self.tokens)

    @property
    def most(self) -> int:
        """Tokens of a cycle, that behind the drafts included."""
        return 1 + (LONGEST if self.tokens == "auto" else self.tokens)

    def dial(self, target: Target, *, auto: bool) -> Dial | None:
        """How many drafts; only under "match" another number gives the same tokens."""
        if self.verify != "match" or not (auto or self.tokens == "auto"):
            return None
        return Dial(
            values=range(1, min(self.most, MOST) + 1),
            passes=lambda n, _: [
                ("draft", 2, n > 1),
                ("draft", 1, max(n - 2, 0)),
                ("target", n, 1),
            ],
        )

    def decode(self, request: Request) -> Decoding:
        """Draft some tokens, keep those that the target agrees with and its next one."""
        own = request.sample()
        # The noise of the target makes the draft say the same more often than none does.
        read = draft_read(request, self.verify, match=own)
        alive = yield from plain(request, 0, own)
        ready = 0  # slots of the draft that hold the text
        while alive:
            n = len(request)
            drafted: list[int] = []
            guesses: list[Tensor | None] = []
            count = request.dial(min(self.most, request.limit - n), behind=n - ready) - 1
            if not count:
                alive = yield from plain(request, n - 1, own)
                continue
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
            ready = min(ready, n + kept)
            alive = request.commit(out.tokens[: kept + 1], out.logprobs)
