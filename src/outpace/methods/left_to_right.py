"""Fixed-k semi-autoregressive decoding of a diffusion model, the baseline of APD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outpace.decoding import FULL, Decoding, Forward, Kind, OptionError, Request
from outpace.field_types import PositiveInt
from outpace.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class LeftToRight(Method):
    """Accept the leftmost k tokens of each forward (Israel et al., 2025, figures 2, 4 and 6).

    `tokens=1` decodes strictly left to right. `window` keeps the keys of all but the last tokens
    (None recomputes everything). `lookahead` is the number of masks (None for all up to the limit).
    """

    target_kinds = (Kind.DIFFUSION,)

    tokens: Annotated[PositiveInt, "k, tokens accepted per forward"] = 1
    window: Annotated[
        PositiveInt | None, "recompute the last group and window − 1 tokens before it"
    ] = None
    lookahead: Annotated[PositiveInt | None, "number of masks, at least tokens"] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookahead is not None and self.lookahead < self.tokens:
            raise OptionError("lookahead", self.lookahead, f"must be at least tokens={self.tokens}")

    def decode(self, request: Request) -> Decoding:
        """Run the uncached text and the masks after it; accept the first k tokens."""
        start, step, alive = 0, 0, True
        while alive:
            n = len(request)
            end = min(n + (self.lookahead or request.max_tokens), request.limit)
            out = yield Forward(
                ids=request.ids[start:] + request.lookahead_ids(end),
                start=start,
                pattern=FULL,
                predict=range(n, min(n + self.tokens, end)),
                read=request.sample(step, joint=True),
            )
            start = 0 if self.window is None else max(n - self.window + 1, 0)
            step += 1
            alive = request.commit(out.tokens, out.logprobs)
