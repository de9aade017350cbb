"""Fast-dLLM: parallel decoding by confidence, and keys cached within a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from outpace.decoding import FULL, Canvas, Decoding, Forward, Kind, OptionError, Prediction, Request
from outpace.decoding.canvas import split_blocks
from outpace.decoding.forward import IntArray
from outpace.decoding.order import (
    rank_scores,
    reaching_threshold,
    top_holes,
    within_budget,
    within_factor,
)
from outpace.decoding.target import Rank
from outpace.field_types import MAX_FLOAT, Bounds, NonNegativeFloat, PositiveFraction, PositiveInt
from outpace.methods.method import Method

CacheMode = Literal["prefix", "dual"]
DEFAULT_BLOCK_TOKENS = 32

LIMITS = ("factor", "budget", "entropy_limit")
"""Options that replace the threshold."""


@dataclass(frozen=True, kw_only=True)
class FastDLLM(Method):
    """Fill all holes of a block that are confident enough, and cache the keys around it.

    "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel
    Decoding" (Wu et al., 2025). Each block begins with a forward of the whole canvas. After it,
    `cache="prefix"` recomputes the block and everything after it, `"dual"` the block only, and None
    everything. A forward fills the best hole, and all others whose confidence reaches `threshold`
    (None: no others). `factor`, `budget` or `entropy_limit` replace the threshold: the paper's rule
    of a factor, the entropy budget of the EB-Sampler (Ben-Hamu et al., 2025), or the limit of
    dParallel (Chen et al., 2025) and d3LLM (Qian et al., 2026).

    The answer ends once everything up to an end-of-sequence is filled; with `canvas` all holes are
    filled, as in the authors' code. A `block` is 32 tokens by default, unless the model has another
    default.
    """

    target_kinds = (Kind.DIFFUSION,)

    threshold: Annotated[
        PositiveFraction | None,
        "holes whose confidence reaches it are filled; None: one hole per forward",
    ] = 0.9
    factor: Annotated[
        Annotated[float, Bounds(0, MAX_FLOAT, above=True)] | None,
        "instead of threshold, the paper's rule: the n best holes while the n-th is "
        "surer than 1 − factor / (n + 1)",
    ] = None
    budget: Annotated[
        NonNegativeFloat | None,
        "instead of threshold, the entropy that the holes of a forward may share",
    ] = None
    entropy_limit: Annotated[
        NonNegativeFloat | None, "instead of threshold, holes of a lower entropy are filled"
    ] = None
    cache: Annotated[CacheMode | None, "prefix, dual, or None, which recomputes everything"] = (
        "dual"
    )
    block: Annotated[PositiveInt | None, "tokens of a block"] = None
    canvas: Annotated[bool, "fill all holes"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = [name for name in LIMITS if getattr(self, name) is not None]
        if len(limits) > 1:
            raise OptionError(
                limits[0], getattr(self, limits[0]), f"cannot be combined with {limits[1]}"
            )

    def block_size(self, request: Request) -> int:
        """Return the number of tokens of a block; the last one of an answer may have fewer."""
        return self.block or request.target.block or DEFAULT_BLOCK_TOKENS

    @property
    def is_sequential(self) -> bool:
        return False

    def decode(self, request: Request) -> Decoding:
        """Refresh all keys at the start of a block, then run only the rows that are not cached."""
        canvas, step = Canvas.from_request(request), 0
        canvas.append_slots(request.max_tokens)
        score: Rank = "confidence" if self.budget is self.entropy_limit is None else "entropy"
        for begin, end in split_blocks(len(request), request.limit, self.block_size(request)):
            cache: CacheMode | None = None
            while holes := canvas.holes_within(begin, end):
                # On a shifted model the first token of a block is predicted by the row before it,
                # which runs only in the refresh; as in the authors' code, that fills no other hole.
                if cache is None and self.cache and request.target.shift:
                    holes = holes[:1]
                first = 0 if cache is None else begin
                last = min(end, len(canvas)) if cache == "dual" else len(canvas)
                read = request.sample(
                    step, scores=(score,), score_as_drawn=request.target.score_as_drawn, joint=True
                )
                out = yield Forward(
                    ids=canvas.ids[first:last],
                    start=first,
                    pattern=FULL,
                    visible_end=len(canvas),
                    predict=holes,
                    read=read,
                )
                slots = canvas.fill_chosen(holes, self.choose_holes(out), out)
                if not self.canvas and not canvas.commit_prefix(request, slots):
                    return
                cache, step = self.cache, step + 1
        canvas.commit_until(request, len(canvas))

    def choose_holes(self, out: Prediction) -> IntArray:
        if self.budget is not None:
            return within_budget(rank_scores(out, "entropy"), out.scores["entropy"], self.budget)
        if self.entropy_limit is not None:
            return reaching_threshold(rank_scores(out, "entropy"), -self.entropy_limit)
        confidence = rank_scores(out, "confidence")
        if self.factor is not None:
            return within_factor(confidence, self.factor)
        if self.threshold is None:
            return top_holes(confidence)
        return reaching_threshold(confidence, self.threshold)
