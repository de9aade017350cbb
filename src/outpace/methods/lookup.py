"""Prompt lookup: drafts copied from the text itself, verified in one pass."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated

from outpace.decoding import Decoding, Forward, LengthRange, Prediction, Read, Request, Target
from outpace.decoding.draft_length import halving_values
from outpace.field_types import PositiveInt
from outpace.methods.copies import MAX_COPY_TOKENS, MAX_MATCH_TOKENS, CopyFinder, verify_chain
from outpace.methods.method import DraftLength, Method, SharesText, check_length, decode_plain

Cycle = Generator[Forward, Prediction, bool]


@dataclass(frozen=True, kw_only=True)
class Lookup(Method):
    """Copy what followed the last tokens at an earlier occurrence, and verify it in one pass.

    Prompt lookup (Saxena, 2023) over the prompt and the answer so far. Among several occurrences
    the longest match is preferred, then the most frequent next token, as in SuffixDecoding (Oliaro
    et al., 2024). A copy is proposed where at least `match` tokens repeat; elsewhere one token is
    decoded. As many tokens are copied as match, at most `tokens`; "auto" uses the measured optimum,
    which may be 0. With `shared`, answers of earlier requests to the model are copied as well.
    Lossless: the output is the autoregressive one of the same seed.
    """

    tokens: Annotated[
        DraftLength, "most tokens copied at a time: a number, or the measured optimum, up to 24"
    ] = "auto"
    match: Annotated[PositiveInt, "tokens at the end of the text that must occur earlier too"] = 1

    shared: Annotated[
        bool, SharesText(), "also copy from the answers of earlier requests, and keep this one"
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self.tokens, "match")

    @property
    def cycle_limit(self) -> int:
        """Most tokens of a cycle, including the one after the copy."""
        return 1 + (MAX_COPY_TOKENS if self.tokens == "auto" else self.tokens)

    def length_range(self, target: Target, *, auto: bool) -> LengthRange | None:
        if not (auto or self.tokens == "auto"):
            return None
        return LengthRange(
            values=halving_values(1, self.cycle_limit),
            # Most matches are short: on average, one copied token is rejected.
            passes=lambda n, kept: [("target", min(n, kept + 1), 1)],
        )

    @property
    def is_resumable(self) -> bool:
        return True

    def decode(self, request: Request) -> Decoding:
        """Run the last token and a copy; commit the accepted ones and the model's next token."""
        shared = request.shared_answers if self.shared else None
        read, copies = request.sample(), CopyFinder(self.match, shared)
        try:
            alive = yield from decode_plain(request, 0, read)
            while alive:
                alive = yield from self.run_cycle(request, copies, read)
        finally:  # also where a stop string ended the request
            if shared is not None and request.finish_reason is not None:
                shared.add_answer(request.ids[max(len(request.prompt) - MAX_MATCH_TOKENS, 0) :])

    def run_cycle(self, request: Request, copies: CopyFinder, read: Read) -> Cycle:
        n = len(request)
        max_copied = min(self.cycle_limit, request.limit - n) - 1
        drafted = copies.find_copy(request.ids, max_copied)
        if drafted and request.forced_tokens:
            drafted = []  # forced tokens run with the plain row
        elif drafted:
            del drafted[request.choose_length(max_copied + 1) - 1 :]
        if not drafted:
            return (yield from decode_plain(request, n - 1, read))
        alive = yield from verify_chain(request, drafted, read)
        request.report_cycle()  # the next cycle may find no copy, and choose no length
        return alive
