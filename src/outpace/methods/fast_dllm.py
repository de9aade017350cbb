"""Fast-dLLM: parallel decoding by confidence, and keys cached within a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from outpace.decoding import (
    FULL,
    Canvas,
    Decoding,
    Forward,
    Kind,
    OptionError,
    Prediction,
    Request,
)
from outpace.decoding.canvas import blocks
from outpace.decoding.forward import IntArray
from outpace.decoding.order import best, factor, rank, reaching, within_budget
from outpace.decoding.target import Rank
from outpace.methods.bounds import at_least_one, not_negative, positive_fraction
from outpace.methods.method import Among, Method, Within

Cache = Literal["prefix", "dual"]
BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class FastDLLM(Method):
    """Fill all holes of a block that are confident enough, and cache the keys around it.

    "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel
    Decoding" (Wu et al., 2025). Each block begins with a forward of the whole canvas. After it,
    `cache="prefix"` recomputes the block and everything after it, `"dual"` the block only, and None
    everything. A forward fills the best hole, and all others whose confidence reaches `threshold`
    (None: no others). `factor` or `budget` replace the threshold: the paper's rule of a factor, or
    the entropy budget of the EB-Sampler (Ben-Hamu et al., 2025).

    The answer ends once everything up to an end-of-sequence is filled; with `canvas` all holes are
    filled, as in the authors' code. A `block` is 32 tokens by default, unless the model has another
    default.
    """

    decodes = (Kind.DIFFUSION,)

    threshold: Annotated[
        float | None,
        Within(0.5, 1),
        "holes whose confidence reaches it are filled; None: one hole per forward",
    ] = 0.9
    factor: Annotated[
        float | None,
        "instead of threshold, the paper's rule: the n best holes while the n-th is "
        "surer than 1 − factor / (n + 1)",
    ] = None
    budget: Annotated[
        float | None, "instead of threshold, the entropy that the holes of a forward may share"
    ] = None
    cache: Annotated[
        Cache | None,
        Among(("prefix", "dual")),
        "prefix, dual, or None, which recomputes everything",
    ] = "dual"
    block: Annotated[int | None, Among((8, 16, 32)), "tokens of a block"] = None
    canvas: Annotated[bool, "fill all holes"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(block=self.block)
        positive_fraction(threshold=self.threshold)
        if self.factor is not None and self.factor <= 0:
            message = f"factor must be a positive number, got {self.factor}"
            raise OptionError("factor", self.factor, message)
        not_negative(budget=self.budget)
        if self.factor is not None and self.budget is not None:
            message = "factor and budget are alternatives: set only one of them"
            raise OptionError("factor", self.factor, message)

    def size(self, request: Request) -> int:
        """Return the tokens of a block; the last one of an answer may have fewer."""
        return self.block or request.target.block or BLOCK

    @property
    def sequential(self) -> bool:
        """False: holes are filled in any order."""
        return False

    def decode(self, request: Request) -> Decoding:
        """Refresh all keys at the start of a block, then run only the rows that are not cached."""
        canvas, step = Canvas.of(request), 0
        canvas.extend(request.max_tokens)
        score: Rank = "confidence" if self.budget is None else "entropy"
        for begin, end in blocks(len(request), request.limit, self.size(request)):
            cache: Cache | None = None
            while holes := canvas.within(begin, end):
                # On a shifted model the first token of a block is predicted by the row before it,
                # which runs only in the refresh; as in the authors' code, that fills no other hole.
                if cache is None and self.cache and request.target.shift:
                    holes = holes[:1]
                first = 0 if cache is None else begin
                last = min(end, len(canvas)) if cache == "dual" else len(canvas)
                out = yield Forward(
                    ids=canvas.ids[first:last],
                    start=first,
                    pattern=FULL,
                    reach=len(canvas),
                    predict=holes,
                    read=request.sample(
                        step, scores=(score,), drawn=request.target.drawn, joint=True
                    ),
                )
                slots = canvas.take(holes, self.choose(out), out)
                if not self.canvas and not canvas.settle(request, slots):
                    return
                cache, step = self.cache, step + 1
        canvas.commit(request, len(canvas))

    def choose(self, out: Prediction) -> IntArray:
        """Return the indices of the holes to fill."""
        if self.budget is not None:
            return within_budget(rank(out, "entropy"), out.scores["entropy"], self.budget)
        confidence = rank(out, "confidence")
        if self.factor is not None:
            return factor(confidence, self.factor)
        return best(confidence) if self.threshold is None else reaching(confidence, self.threshold)
