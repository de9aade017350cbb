"""Lookup: the text itself drafts, where it repeats, and the model verifies in one pass."""

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
    """Copy what followed the last tokens where they stood before, and verify it in one pass.

    Prompt lookup (Saxena, 2023) over the prompt and the answer so far. Of several places the
    longest match decides, then the next token that is the most frequent, as in SuffixDecoding
    (Oliaro et al., 2024). A copy is proposed where at least `match` tokens repeat, and elsewhere
    nothing, which costs nothing. At most `tokens` are copied; "auto" copies as many as pay, or
    none. Lossless: the output is the autoregressive one of the same seed.
    """

    tokens: Annotated[
        Length,
        Within(1, LONGEST),
        "tokens copied at a time: a number, or as many (12 at most) as pay",
    ] = "auto"
    match: Annotated[
        int, Within(1, 4), "tokens at the end of the text that must stand before too"
    ] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.tokens, "match")
        at_least_one(match=self.match)

    @property
    def most(self) -> int:
        """Tokens of a cycle, the one after the copy included."""
        return 1 + (LONGEST if self.tokens == "auto" else self.tokens)

    def dial(self, target: Target, *, auto: bool) -> Dial | None:
        """How many tokens are copied; another number gives the same text."""
        if not (auto or self.tokens == "auto"):
            return None
        return Dial(
            values=range(1, min(self.most, MOST) + 1), passes=lambda n, _: [("target", n, 1)]
        )

    def decode(self, request: Request) -> Decoding:
        """Feed the last token and a copy; commit what the model agrees with and its next token."""
        read, copies = request.sample(), Copies(self.match)
        alive = yield from plain(request, 0, read)
        while alive:
            n, forced = len(request), request.forced
            room = min(self.most, request.limit - n) - 1
            drafted = forced[:room] if forced else copies.find(request.ids, room)
            if not forced and drafted:
                del drafted[request.dial(room + 1) - 1 :]
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
            request.account()  # the next cycle may find no copy, and ask for no length
