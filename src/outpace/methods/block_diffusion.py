"""Block diffusion: block after block, each of which sees itself and those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np

from outpace.decoding import Canvas, Decoding, Forward, Kind, OptionError, Prediction, Request
from outpace.decoding.canvas import split_blocks
from outpace.decoding.forward import IntArray
from outpace.decoding.order import (
    above_threshold,
    rank_scores,
    top_holes,
    within_budget,
    within_frechet,
)
from outpace.decoding.rules import BoolArray, start_history
from outpace.decoding.target import Rank
from outpace.methods.bounds import check_at_least_one, check_default, check_fraction
from outpace.methods.method import Interval, OneOf, block_length
from outpace.methods.rule import CertainMethod
from outpace.methods.self_verified import decode_verified

MAX_EDIT_FORWARDS = 16
"""Most forwards of a full block that edit it, as in the authors' code."""

FillOrder = Literal["confidence", "margin", "entropy", "left_to_right"]


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(CertainMethod):
    """Fill the holes of one block, then those of the next; keys of full blocks are cached.

    The sampler of SDAR (Cheng et al., 2025), and with `part` that of Fast-dLLM v2 (Wu et al.,
    2025). Blocks are counted from slot 0, so the end of the prompt shares one with the beginning of
    the answer. A forward fills all holes above `threshold`, or the best ones by `order` within an
    entropy `budget` (the EB-Sampler of Ben-Hamu et al., 2025), and at least enough to fill a block
    in `steps` forwards. Keys of a block are final once it runs without holes, in the same forward
    as the first one of the next block. In a model of shift 1 that forward runs the full block only,
    and predicts the first token after it. With `verify` the output is that of blocks of one token
    (S2D2, Han et al., 2026). With `edit`, the joint threshold of LLaDA2.1 (Bie et al., 2026), each
    forward also replaces filled tokens of its block, which is committed once nothing changes.

    Attributes:
        part: tokens of a block that must be filled before those after them.
        canvas: fill all of the block in which the answer ends, as the authors' code does.
    """

    target_kinds = (Kind.BLOCK,)

    threshold: Annotated[
        float | None,
        Interval(0.5, 1),
        "holes of a higher confidence are filled; None: the number given by steps",
    ] = 0.9
    budget: Annotated[
        float | None, "instead of threshold, the entropy that the holes of a forward may share"
    ] = None
    steps: Annotated[int | None, "most forwards that fill a block; one per token by default"] = None
    order: Annotated[
        FillOrder,
        OneOf(("confidence", "entropy", "margin")),
        "ranking of holes where too few exceed the threshold",
    ] = "confidence"
    part: Annotated[int | None, "tokens of a block that must be filled before those after them"] = (
        None
    )
    block: Annotated[int | None, "tokens of a block; as the model was trained by default"] = None
    canvas: Annotated[bool, "fill all of the block in which the answer ends"] = False
    edit: Annotated[
        float | None,
        "tokens of the open block are replaced by others of a higher confidence than this; 0: by "
        "any; None: never",
    ] = None
    verify: Annotated[bool, "emit only what blocks of one token would generate"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(steps=self.steps, part=self.part, block=self.block)
        check_fraction(threshold=self.threshold, edit=self.edit)
        if self.edit is not None:
            check_default(self, "rule", "canvas", reason="edit, which fills whole blocks")
        if self.verify:
            unused = ("budget", "steps", "order", "part", "canvas", "rule", "edit")
            check_default(self, *unused, reason="verify, which drafts in one forward")

    def check_request(self, request: Request) -> None:
        """Raise `ValueError` where the block length is unknown, or a constraint is edited."""
        block_length(request, self.block)
        if self.edit is not None and request.constraint is not None:
            message = f"edit must be None with a constraint or template, got {self.edit}"
            raise OptionError("edit", self.edit, message)

    @property
    def is_sequential(self) -> bool:
        """Whether each token is conditioned on all before it, as only verification ensures."""
        return self.verify

    def decode(self, request: Request) -> Decoding:
        """Run the block and earlier slots without final keys, fill some of its holes."""
        size, shift = block_length(request, self.block), request.target.shift
        if self.verify:
            yield from decode_verified(request, size, self.threshold)
            return
        quotient, remainder = divmod(size, min(self.steps or size, size))
        canvas, start = Canvas.from_request(request), 0
        history = start_history(self.rule, self.klass_divergence)
        for begin, end in split_blocks(len(request) - len(request) % size, request.limit, size):
            canvas.append_slots(max(end - len(canvas), 0))
            # With shift 1 the first slot is predicted once, by a block that no longer changes.
            editable = [] if self.edit is None else canvas.holes_within(begin + shift, end)
            fills = step = edits = 0
            while (holes := canvas.holes_within(begin, end)) or (
                editable and edits < MAX_EDIT_FORWARDS
            ):
                # With shift 1 the first hole is predicted by the last row of the full block before.
                only_first = bool(shift) and holes[:1] == [begin]
                filled = [] if only_first else [slot for slot in editable if slot not in holes]
                holes, last = (
                    (holes[:1], begin) if only_first else (self.first_part(holes, begin), end)
                )
                read = request.sample(
                    step, scores=self.needed_scores, score_as_drawn=True, joint=True
                )
                out = yield Forward(
                    ids=canvas.ids[start:last],
                    start=start,
                    pattern=tuple(min(size, last - first) for first in range(start, last, size)),
                    predict=[*holes, *filled],
                    read=history.read(read, holes),
                )
                may_fill = history.record(holes, out)
                start, step, edits = begin, step + 1, edits + (not holes)
                count = 1 if only_first else quotient + (fills < remainder)
                fills += not only_first
                canvas.fill_chosen(holes, self.choose_holes(out, count, may_fill), out)
                if editable:
                    if not (self.replace_certain(canvas, filled, out) or holes):
                        start = end - shift  # this forward has written the final keys
                        break
                elif not (
                    self.canvas and canvas.holes_within(begin, end)
                ) and not canvas.commit_until(request):
                    return
            if editable and not canvas.commit_until(request):
                return
        canvas.commit_until(request)

    def replace_certain(self, canvas: Canvas, filled: list[int], out: Prediction) -> list[int]:
        """Replace tokens of filled slots, the last entries of `out`; return the changed slots."""
        assert self.edit is not None
        first = len(out.tokens) - len(filled)
        certain = above_threshold(out.scores["confidence"][first:], self.edit)
        return canvas.replace_chosen(filled, certain, out, first)

    @property
    def needed_scores(self) -> tuple[Rank, ...]:
        """Scores that the choice of holes needs."""
        wanted = {self.order}
        if self.budget is not None:
            wanted.add("entropy")
        if (
            self.edit is not None
            or self.rule == "frechet"
            or (self.threshold is not None and self.budget is None)
        ):
            wanted.add("confidence")
        return tuple(score for score in get_args(Rank) if score in wanted)

    def first_part(self, holes: list[int], begin: int) -> list[int]:
        """Return the holes in the first part of a block that has any."""
        if self.part is None or not holes:
            return holes
        end = begin + ((holes[0] - begin) // self.part + 1) * self.part
        return [hole for hole in holes if hole < end]

    def choose_holes(self, out: Prediction, count: int, may_fill: BoolArray) -> IntArray:
        """Return the indices of the holes to fill, at least `count` where possible.

        `may_fill` has an entry for each hole: whether it may be filled by its confidence.
        """
        holes = len(may_fill)
        leftmost = np.arange(holes, 0, -1, dtype=np.float32)
        ranks = leftmost if self.order == "left_to_right" else rank_scores(out, self.order)[:holes]
        chosen = top_holes(ranks, count)
        if self.budget is not None:
            within = within_budget(ranks, out.scores["entropy"][:holes], self.budget)
        elif self.rule == "frechet":
            within = within_frechet(out.scores["confidence"][:holes], self.frechet_margin)
        elif self.threshold is not None:
            confidence = out.scores["confidence"][:holes] * may_fill
            within = above_threshold(confidence, self.threshold)
        else:
            return chosen
        return within if len(within) >= len(chosen) else chosen
