"""Lookahead parallel decoding of block diffusion models (LoPA).

"LoPA: Scaling dLLM Inference via Lookahead Parallel Decoding" (Xu et al., 2025, section 3.2 and
algorithm 1): the anchor branch fills the holes that the method chooses. Each lookahead branch fills
one more of the remaining holes, the most confident ones. One forward runs all branches, and the one
with the highest mean confidence of its holes continues. Its predictions also choose the next holes,
so no forward serves the comparison alone.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np

from outpace.decoding import Canvas, Forward, OptionError, Prediction, Read, Request, Tree
from outpace.decoding.forward import IntArray
from outpace.decoding.order import rank_descending
from outpace.decoding.rules import HoleHistory
from outpace.decoding.sampling import Sample
from outpace.decoding.tree import MAX_TREE_SLOTS
from outpace.methods.block_filling import BlockFilling

BranchRun = Generator[Forward, Prediction, tuple[list[int], Prediction]]


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Predicted holes that branches fill in addition, each a different one.

    Attributes:
        method: chooses by its `order` what the paper calls confidence.
        holes: slots that were predicted.
        out: their predictions.
        further: indices of the holes to fill, the most confident first.
    """

    method: BlockFilling
    holes: Sequence[int]
    out: Prediction
    further: IntArray

    @classmethod
    def spawn(
        cls,
        method: BlockFilling,
        holes: Sequence[int],
        out: Prediction,
        chosen: IntArray,
        count: int,
    ) -> tuple[IntArray, Lookahead | None]:
        """Return the indices of the holes to fill, and at most `count` branches, if any.

        A branch without holes has the highest confidence, as in the authors' code. So a single
        remaining hole is filled at once.
        """
        ranked = rank_descending(method.rank_holes(out, len(holes)))
        rest = ranked[~np.isin(ranked, chosen)]
        if len(rest) < 2:
            return np.append(chosen, rest), None
        return chosen, cls(method, holes, out, rest[:count])

    def run_branches(
        self, request: Request, canvas: Canvas, begin: int, read: Sample, history: HoleHistory
    ) -> BranchRun:
        """Run all branches of the block from slot `begin` on, and fill the hole of the best one.

        The anchor is the last branch. Of equal ones the first is the best, as in the authors' code.

        Returns:
            The holes of the best branch, and their predictions.
        """
        anchor, open_holes = canvas.ids[begin:], canvas.holes_within(begin, len(canvas))
        texts, holes = list[list[int]](), list[list[int]]()
        for index in self.further.tolist():
            row = self.holes[index] - begin
            texts.append([*anchor[:row], self.out.tokens[index], *anchor[row + 1 :]])
            holes.append([slot for slot in open_holes if slot != self.holes[index]])
        texts, holes = [*texts, anchor], [*holes, open_holes]
        read = history.read(read, list(chain(*holes)))
        out = yield forward_of_branches(request, texts, holes, begin, read)
        bounds = list(pairwise(accumulate(map(len, holes), initial=0)))
        ranks = self.method.rank_holes(out, bounds[-1][1])
        best = int(np.argmax([ranks[first:last].mean() for first, last in bounds]))
        canvas.fill_chosen(self.holes, self.further[best : best + 1], self.out)
        return holes[best], out.entries(*bounds[best])


def forward_of_branches(
    request: Request,
    texts: Sequence[Sequence[int]],
    holes: Sequence[Sequence[int]],
    begin: int,
    read: Read,
) -> Forward:
    """Return a forward of texts of one block, each of which sees the text before and itself.

    They are stored one after the other from slot `begin` on, with the positions of the block.
    """
    target, size = request.target, len(texts[0])
    shift = target.shift if target.mask_shift is None else target.mask_shift
    wanted = [(size * place, slot) for place, each in enumerate(holes) for slot in each]
    return Forward(
        ids=list(chain(*texts)),
        start=begin,
        pattern=Tree(
            begin,
            tuple(
                (1 << size) - 1 << size * place for place in range(len(texts)) for _ in range(size)
            ),
        ),
        positions=[*range(begin, begin + size)] * len(texts),
        predict=[slot for _, slot in wanted],
        predict_from=[slot + moved - shift for moved, slot in wanted],
        read=read,
        branches=[
            text[len(request) - begin : slot - begin]
            for text, each in zip(texts, holes, strict=True)
            for slot in each
        ]
        if request.processors
        else None,
    )


def check_lookahead(count: int, size: int) -> None:
    """Raise `OptionError` for more branches of blocks of `size` than one forward can hold."""
    most = MAX_TREE_SLOTS // size - 1
    if count > most:
        allowed = f"at most {most}" if most > 0 else "None"
        message = (
            f"lookahead must be {allowed} with blocks of {size}, got {count}: the branches of a "
            f"block have at most {MAX_TREE_SLOTS} rows together"
        )
        raise OptionError("lookahead", count, message)
