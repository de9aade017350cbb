"""Options of which holes of a block are filled in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Annotated, Literal, get_args

import numpy as np

from outpace.decoding import Forward, OptionError, Prediction, Read, Request
from outpace.decoding.forward import IntArray
from outpace.decoding.order import above_threshold, rank_scores, top_holes, within_budget
from outpace.decoding.target import Rank, Target
from outpace.field_types import Fraction, NonNegativeFloat, PositiveInt
from outpace.methods.method import Method

FillOrder = Literal["confidence", "margin", "entropy", "left_to_right"]


@dataclass(frozen=True, kw_only=True)
class BlockFilling(Method):
    """A method that fills a block in several forwards, several holes in each.

    A forward fills all holes above `threshold`, or the best ones by `order` within an entropy
    `budget` (the EB-Sampler of Ben-Hamu et al., 2025), and at least enough to fill a block in
    `steps` forwards: the dynamic and the static decoding of SDAR.
    """

    threshold: Annotated[
        Fraction | None, "holes of a higher confidence are filled; None: the number given by steps"
    ] = 0.9
    budget: Annotated[
        NonNegativeFloat | None,
        "instead of threshold, the entropy that the holes of a forward may share",
    ] = None
    steps: Annotated[
        PositiveInt | None, "most forwards that fill a block; one per token by default"
    ] = None
    order: Annotated[FillOrder, "ranking of holes where too few exceed the threshold"] = (
        "confidence"
    )
    part: Annotated[
        PositiveInt | None, "tokens of a block that must be filled before those after them"
    ] = None
    """The sub-blocks of Fast-dLLM v2."""

    @property
    def needed_scores(self) -> tuple[Rank, ...]:
        wanted = {self.order}
        if self.budget is not None:
            wanted.add("entropy")
        elif self.threshold is not None:
            wanted.add("confidence")
        return tuple(score for score in get_args(Rank) if score in wanted)

    def next_holes(
        self, holes: list[int], begin: int, end: int, shift: int
    ) -> tuple[list[int], int]:
        """Return which holes of a block are predicted next, and the slot up to which rows run."""
        # They are those of the first part that has any. With shift 1 the first hole is predicted by
        # the last row of the block before, which is full, and runs without this block.
        if shift and holes[:1] == [begin]:
            return holes[:1], begin
        if self.part is None or not holes:
            return holes, end
        stop = begin + ((holes[0] - begin) // self.part + 1) * self.part
        return [hole for hole in holes if hole < stop], end

    def least_count(self, size: int, fills: int) -> int:
        """Return how many holes the next forward fills at least, after `fills` of this block."""
        # Equal counts, the first ones larger by the remainder.
        quotient, remainder = divmod(size, min(self.steps or size, size))
        return quotient + (fills < remainder)

    def choose_holes(self, out: Prediction, least: int, count: int) -> IntArray:
        """Return the indices of the holes to fill among the first `count`, at least `least`."""
        ranks = (
            np.arange(count, 0, -1, dtype=np.float32)
            if self.order == "left_to_right"
            else rank_scores(out, self.order)[:count]
        )
        chosen = top_holes(ranks, least)
        if self.budget is not None:
            within = within_budget(ranks, out.scores["entropy"][:count], self.budget)
        elif self.threshold is not None:
            within = above_threshold(out.scores["confidence"][:count], self.threshold)
        else:
            return chosen
        return within if len(within) >= len(chosen) else chosen


def forward_of_blocks(
    target: Target,
    ids: Sequence[int],
    *,
    start: int,
    size: int,
    begin: int,
    predict: Sequence[int],
    read: Read,
) -> Forward:
    """Return a forward of a text from slot `start` on; each block sees itself and those before.

    In a causal model that fills blocks only the open block does, from slot `begin` on.
    """
    end, predict_from = len(ids), None
    pattern = tuple(min(size, end - first) for first in range(start, end, size))
    if target.mask_shift is not None:
        pattern = (*repeat(1, begin - start), *[end - begin] * (end > begin))
        predict_from = predict if end > begin and not target.mask_shift else None
    return Forward(
        ids=ids[start:],
        start=start,
        pattern=pattern,
        predict=predict,
        predict_from=predict_from,
        read=read,
    )


def block_length(request: Request, block: int | None) -> int:
    """Return the block length of a block diffusion model: the option, or the model's default.

    Raises:
        OptionError: neither is set.
    """
    if size := block or request.target.block:
        return size
    raise OptionError(
        "block", block, "must be the model's block length, which config.json does not name"
    )
