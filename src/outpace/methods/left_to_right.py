"""Fixed-k semi-autoregressive decoding of a diffusion model, APD's baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outpace.decoding import FULL, Decoding, Forward, Kind, OptionError, Request
from outpace.methods.bounds import at_least_one
from outpace.methods.method import Method, Within


@dataclass(frozen=True, kw_only=True)
class LeftToRight(Method):
    """Take the leftmost k holes of each forward (Israel et al., 2025, figures 2, 4 and 6).

    `tokens=1` decodes exactly left to right. `window` keeps the keys of all but the last tokens
    (None feeds everything again), `lookahead` is how many masks are shown (None shows all up to
    the limit).
    """

    decodes = (Kind.DIFFUSION,)

    tokens: Annotated[int, Within(1, 8), "k, holes taken from each forward"] = 1
    window: Annotated[
        int | None,
        Within(2, 64, log=True),
        "feed again the last group and window − 1 tokens before it",
    ] = None
    lookahead: Annotated[int | None, Within(8, 128, log=True), "masks shown, at least tokens"] = (
        None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(tokens=self.tokens, window=self.window, lookahead=self.lookahead)
        if self.lookahead is not None and self.lookahead < self.tokens:
            raise OptionError(
                "lookahead",
                self.lookahead,
                f"lookahead {self.lookahead} shows fewer holes than the tokens={self.tokens} "
                "that are taken; make it at least as large",
            )

    def decode(self, request: Request) -> Decoding:
        """Show what was not yet kept and the holes behind it; keep the first k tokens."""
        start, step, alive = 0, 0, True
        while alive:
            n = len(request)
            end = min(n + (self.lookahead or request.max_tokens), request.limit)
            out = yield Forward(
                ids=request.ids[start:] + request.ahead(end),
                start=start,
                pattern=FULL,
                predict=range(n, min(n + self.tokens, end)),
                read=request.sample(step, joint=True),
            )
            start = 0 if self.window is None else max(n - self.window + 1, 0)
            step += 1
            alive = request.commit(out.tokens, out.logprobs)
