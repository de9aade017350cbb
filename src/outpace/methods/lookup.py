"""Prompt lookup: drafts copied from the text itself, verified in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outpace.decoding import Decoding, Dial, Forward, Request, Target, agreement
from outpace.decoding.dial import MOST
from outpace.methods.bounds import at_least_one
from outpace.methods.copies import Copies
from outpace.methods.method import Length, Method, Within, check_length
from outpace.methods.plain import plain

LONGEST = 12
"""Most tokens that "auto" copies."""


@dataclass(frozen=True, kw_only=True)
class Lookup(Method):
    """Copy what followed the last tokens at an earlier occurrence, and verify it in one pass.

    Prompt lookup (Saxena, 2023) over the prompt and the answer so far. Among several occurrences
    the longest match is preferred, then the most frequent next token, as in SuffixDecoding (Oliaro
    et al., 2024). A copy is proposed where at least `match` tokens repeat; elsewhere one token is
    decoded. At most `tokens` are copied; "auto" uses the measured optimum, which may be 0.
    Lossless: the output is the autoregressive one of the same seed.
    """

    tokens: Annotated[
        Length,
        Within(1, LONGEST),
        "tokens copied at a time: a number, or the measured optimum, up to 12",
    ] = "auto"
    match: Annotated[
        int, Within(1, 4), "tokens at the end of the text that must occur earlier too"
    ] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.tokens, "match")
        at_least_one(match=self.match)

    @property
    def most(self) -> int:
        """Most tokens of a cycle, including the one after the copy."""
        return 1 + (LONGEST if self.tokens == "auto" else self.tokens)

    def dial(self, target: Target, *, auto: bool) -> Dial | None:
        """Return the range of copy lengths, which do not change the output."""
        if not (auto or self.tokens == "auto"):
            return None
        return Dial(
            values=range(1, min(self.most, MOST) + 1), passes=lambda n, _: [("target", n, 1)]
        )

    def decode(self, request: Request) -> Decoding:
        """Run the last token and a copy; commit the accepted ones and the model's next token."""
        read, copies = request.sample(), Copies(self.match)
        alive = yield from plain(request, 0, read)
        while alive:
            n, forced = len(request), request.forced
            max_copied = min(self.most, request.limit - n) - 1
            drafted = forced[:max_copied] if forced else copies.find(request.ids, max_copied)
            if not forced and drafted:
                del drafted[request.dial(max_copied + 1) - 1 :]
            if not drafted:
                alive = yield from plain(request, n - 1, read)
                continue
            out = yield Forward(
                ids=[request.ids[-1], *drafted],
                start=n - 1,
                predict=range(n, n + len(drafted) + 1),
                read=read,
            )
            alive = request.commit(out.tokens[: agreement(drafted, out.tokens) + 1], out.logprobs)
            request.account()  # the next cycle may find no copy, and choose no length
