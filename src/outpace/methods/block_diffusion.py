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
    """Fill the holes of one block, then those of the next; keys of full blocks are kept.

    The sampler of SDAR (Cheng et al., 2025), and with `part` that of Fast-dLLM v2 (Wu et al.,
    2025). Blocks are counted from slot 0, so that the end of the prompt shares one with the
    beginning of the answer. A forward fills all holes of more than `threshold`, or as many of the
    best ones by `order` as `budget` of entropy allows (the EB-Sampler of Ben-Hamu et al., 2025); at
    least as many as fill a block in `steps` forwards. Keys of a block are final once it is fed
    without holes, which the first forward of the next block does beside its own work. In a model
    of shift 1 that forward feeds the full block alone, and predicts the first token behind it.
    Raises `ValueError` for bad options.

    Attributes:
        part: tokens of a block that must be filled before those behind them.
        canvas: fill all of the block in which the answer ends, as the authors' code does.
    """

    decodes = (Kind.BLOCK,)

    threshold: Annotated[
        float | None,
        Within(0.5, 1),
        "holes of a higher confidence are filled; None: as many as steps says",
    ] = 0.9
    budget: Annotated[
        float | None, "instead of threshold, the entropy that the holes of a forward may share"
    ] = None
    steps: Annotated[
        int | None, "forwards that fill a block at the latest; one per token by default"
    ] = None
    order: Annotated[
        Filling,
        Among(("confidence", "entropy", "margin")),
        "which holes are best where too few are sure",
    ] = "confidence"
    part: Annotated[
        int | None, "tokens of a block that must be filled before those behind them"
    ] = None
    block: Annotated[int | None, "tokens of a block; as the model was trained by default"] = None
    canvas: Annotated[bool, "fill all of the block in which the answer ends"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(steps=self.steps, part=self.part, block=self.block)
        if self.threshold is not None:
            fraction(threshold=self.threshold)
        not_negative(budget=self.budget)

    def check(self, request: Request) -> None:
        """Raise `ValueError` where nobody says how long a block is."""
        own_block(request, self.block)

    @property
    def sequential(self) -> bool:
        """Holes are filled in any order."""
        return False

    def decode(self, request: Request) -> Decoding:
        """Feed what is not final yet and the block, fill some of its holes."""
        size, shift = own_block(request, self.block), request.target.shift
        each, rest = divmod(size, min(self.steps or size, size))
        canvas, fed, step = Canvas.of(request), 0, 0
        for begin, end in blocks(len(request) - len(request) % size, request.limit, size):
            canvas.extend(max(end - len(canvas), 0))
            turn = 0
            while holes := canvas.within(begin, end):
                # The row before a block has a mask in front of it once, when it has become full.
                lone = bool(shift) and holes[0] == begin
                holes, last = (holes[:1], begin) if lone else (self.front(holes, begin), end)
                out = yield Forward(
                    ids=canvas.ids[fed:last],
                    start=fed,
                    pattern=tuple(min(size, last - first) for first in range(fed, last, size)),
                    predict=holes,
                    read=request.sample(step, scores=self.scores, drawn=True, joint=True),
                )
                fed, step = begin, step + 1
                count = 1 if lone else each + (turn < rest)
                turn += not lone
                canvas.take(holes, self.choose(out, count), out)
                if not (self.canvas and canvas.within(begin, end)) and not canvas.commit(request):
                    return
        canvas.commit(request)

    @property
    def scores(self) -> tuple[Rank, ...]:
        """What the choice of holes looks at."""
        wanted = {self.order}
        if self.budget is not None:
            wanted.add("entropy")
        elif self.threshold is not None:
            wanted.add("confidence")
        return tuple(score for score in get_args(Rank) if score in wanted)

    def front(self, holes: list[int], begin: int) -> list[int]:
        """Those of the first part of a block that has holes."""
        if self.part is None:
            return holes
        end = begin + ((holes[0] - begin) // self.part + 1) * self.part
        return [hole for hole in holes if hole < end]

    def choose(self, out: Prediction, count: int) -> IntArray:
        """Indices of the holes to fill, `count` at least where there are as many."""
        holes = len(out.tokens)
        first = np.arange(holes, 0, -1, dtype=np.float32)
        ranks = first if self.order == "left_to_right" else rank(out, self.order)
        chosen = best(ranks, count)
        if self.budget is not None:
            found = within_budget(ranks, out.scores["entropy"], self.budget)
        elif self.threshold is not None:
            found = above(out.scores["confidence"], self.threshold)
        else:
            return chosen
        return found if len(found) >= len(chosen) else chosen
