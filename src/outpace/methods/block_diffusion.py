"""Block diffusion: block after block, each of which sees itself and those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np

from outpace.decoding import Canvas, Decoding, Forward, Kind, Prediction, Request
from outpace.decoding.canvas import blocks
from outpace.decoding.forward import IntArray
from outpace.decoding.order import above, best, rank, within_budget
from outpace.decoding.target import Rank
from outpace.methods.bounds import at_least_one, fraction, not_negative
from outpace.methods.method import Among, Method, Within, own_block

Filling = Literal["confidence", "margin", "entropy", "left_to_right"]


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Method):
    """Fill the holes of one block, then those of the next; keys of full blocks are cached.

    The sampler of SDAR (Cheng et al., 2025), and with `part` that of Fast-dLLM v2 (Wu et al.,
    2025). Blocks are counted from slot 0, so the end of the prompt shares one with the beginning of
    the answer. A forward fills all holes above `threshold`, or the best ones by `order` within an
    entropy `budget` (the EB-Sampler of Ben-Hamu et al., 2025), and at least enough to fill a block
    in `steps` forwards. Keys of a block are final once it runs without holes, in the same forward
    as the first one of the next block. In a model of shift 1 that forward runs the full block only,
    and predicts the first token after it. Raises `ValueError` for invalid options.

    Attributes:
        part: tokens of a block that must be filled before those after them.
        canvas: fill all of the block in which the answer ends, as the authors' code does.
    """

    decodes = (Kind.BLOCK,)

    threshold: Annotated[
        float | None,
        Within(0.5, 1),
        "holes of a higher confidence are filled; None: the number given by steps",
    ] = 0.9
    budget: Annotated[
        float | None, "instead of threshold, the entropy that the holes of a forward may share"
    ] = None
    steps: Annotated[int | None, "most forwards that fill a block; one per token by default"] = None
    order: Annotated[
        Filling,
        Among(("confidence", "entropy", "margin")),
        "ranking of holes where too few exceed the threshold",
    ] = "confidence"
    part: Annotated[int | None, "tokens of a block that must be filled before those after them"] = (
        None
    )
    block: Annotated[int | None, "tokens of a block; as the model was trained by default"] = None
    canvas: Annotated[bool, "fill all of the block in which the answer ends"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(steps=self.steps, part=self.part, block=self.block)
        if self.threshold is not None:
            fraction(threshold=self.threshold)
        not_negative(budget=self.budget)

    def check(self, request: Request) -> None:
        """Raise `ValueError` where the block length is unknown."""
        own_block(request, self.block)

    @property
    def sequential(self) -> bool:
        """False: holes are filled in any order."""
        return False

    def decode(self, request: Request) -> Decoding:
        """Run the block and earlier slots without final keys, fill some of its holes."""
        size, shift = own_block(request, self.block), request.target.shift
        quotient, remainder = divmod(size, min(self.steps or size, size))
        canvas, start, step = Canvas.of(request), 0, 0
        for begin, end in blocks(len(request) - len(request) % size, request.limit, size):
            canvas.extend(max(end - len(canvas), 0))
            fills = 0
            while holes := canvas.within(begin, end):
                # With shift 1 the first hole is predicted by the last row of the full block before.
                only_first = bool(shift) and holes[0] == begin
                holes, last = (holes[:1], begin) if only_first else (self.front(holes, begin), end)
                out = yield Forward(
                    ids=canvas.ids[start:last],
                    start=start,
                    pattern=tuple(min(size, last - first) for first in range(start, last, size)),
                    predict=holes,
                    read=request.sample(step, scores=self.scores, drawn=True, joint=True),
                )
                start, step = begin, step + 1
                count = 1 if only_first else quotient + (fills < remainder)
                fills += not only_first
                canvas.take(holes, self.choose(out, count), out)
                if not (self.canvas and canvas.within(begin, end)) and not canvas.commit(request):
                    return
        canvas.commit(request)

    @property
    def scores(self) -> tuple[Rank, ...]:
        """Scores that the choice of holes needs."""
        wanted = {self.order}
        if self.budget is not None:
            wanted.add("entropy")
        elif self.threshold is not None:
            wanted.add("confidence")
        return tuple(score for score in get_args(Rank) if score in wanted)

    def front(self, holes: list[int], begin: int) -> list[int]:
        """Return the holes in the first part of a block that has any."""
        if self.part is None:
            return holes
        end = begin + ((holes[0] - begin) // self.part + 1) * self.part
        return [hole for hole in holes if hole < end]

    def choose(self, out: Prediction, count: int) -> IntArray:
        """Return the indices of the holes to fill, at least `count` where possible."""
        holes = len(out.tokens)
        leftmost = np.arange(holes, 0, -1, dtype=np.float32)
        ranks = leftmost if self.order == "left_to_right" else rank(out, self.order)
        chosen = best(ranks, count)
        if self.budget is not None:
            within = within_budget(ranks, out.scores["entropy"], self.budget)
        elif self.threshold is not None:
            within = above(out.scores["confidence"], self.threshold)
        else:
            return chosen
        return within if len(within) >= len(chosen) else chosen
