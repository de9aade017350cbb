"""Discrete diffusion forcing (D2F): a pipeline of blocks, filled at the same time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np

from outpace.decoding import Canvas, Decoding, Forward, Kind, LengthRange, Prediction, Request
from outpace.decoding.draft_length import MAX_PACED_TOKENS
from outpace.decoding.forward import IntArray
from outpace.decoding.order import (
    D2F_ACTIVATE,
    D2F_ADD,
    D2F_BLOCK_SIZE,
    D2F_CONFIDENCE,
    block_pattern,
    filled_share,
    forward_of_holes,
    rank_scores,
    select_block_holes,
)
from outpace.decoding.target import Rank, Target
from outpace.field_types import Bounds, Fraction, PositiveInt
from outpace.methods.block_filling import block_length
from outpace.methods.method import Method, decode_plain


@dataclass(frozen=True, kw_only=True)
class D2F(Method):
    """Fill several blocks at once; each sees those before it, and is cached once it is full.

    The pipelined decoding of "Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion
    Forcing" (Wang et al., 2025, section 3.3). A block is appended once the last one is filled to
    `add`. Blocks accept all tokens above `confidence`. Without one, a block accepts its best one by
    `order`, provided that the one before it is filled to `activate`. An end-of-sequence stops
    appending, and blocks after it are dropped; `canvas` fills them as well, and uses whole blocks
    only, as in the authors' code. With `least` 1 a `Pace` may decode token by token, without
    a mask, if the text may depend on the load and the row of the last token predicts the next one.
    """

    target_kinds = (Kind.DIFFUSION, Kind.BLOCK)
    default_sampling = {"temperature": 0.0, "top_p": 1.0}

    block: Annotated[
        PositiveInt | None, "slots of a block; those of a block diffusion model by default, or 16"
    ] = None
    add: Annotated[
        Fraction, "share of the last block that is filled when the next one is appended"
    ] = D2F_ADD
    activate: Annotated[
        Fraction,
        "share of a block that is filled when the next one accepts a token in every forward",
    ] = D2F_ACTIVATE
    confidence: Annotated[
        Fraction, "tokens of a higher probability are accepted; 1: one token per forward"
    ] = D2F_CONFIDENCE
    order: Annotated[Rank, "ranking of tokens where none exceeds the threshold"] = "confidence"
    canvas: Annotated[bool, "fill everything that was appended, and whole blocks only"] = False
    least: Annotated[
        Annotated[int, Bounds(1, 1)] | None,
        "1: with pace=auto, tokens may be decoded one by one, without a mask, on Dream; "
        "None: they are not",
    ] = None

    def length_range(self, target: Target, *, auto: bool) -> LengthRange | None:
        can_pause = auto and self.least is not None and target.shift == 1
        if not can_pause or target.is_block_causal or self.canvas:
            return None
        size = self.block or D2F_BLOCK_SIZE
        return LengthRange(
            values=(1, MAX_PACED_TOKENS),
            # Masks of a block, its accepted tokens, and the masks of blocks appended early.
            passes=lambda value, kept: [
                ("target", 1 if value == 1 else size + kept * (2 - self.add), 1)
            ],
            nested=False,
        )

    def check_request(self, request: Request) -> None:
        self.block_edges(request)

    def block_edges(self, request: Request) -> tuple[list[int], int]:
        """Return the edges of the blocks of the prompt, and the block length.

        A block diffusion model counts them from slot 0; else the prompt is one block.
        """
        if not request.target.is_block_causal:
            return [0, len(request)], self.block or D2F_BLOCK_SIZE
        size = block_length(request, self.block)
        return list(range(0, len(request) + 1, size)), size

    @property
    def is_sequential(self) -> bool:
        return False

    def decode(self, request: Request) -> Decoding:
        """Run the blocks in flight, fill some of their holes, commit the part before the first."""
        canvas, (edges, size) = Canvas.from_request(request), self.block_edges(request)
        whole_blocks = self.canvas and not request.is_infill  # a template has a fixed end
        limit = request.limit - ((request.limit - edges[-1]) % size if whole_blocks else 0)
        scores = tuple(dict.fromkeys(("confidence", self.order)))
        step, alive, can_pause = 0, True, request.pace and not request.is_infill
        while alive:
            if can_pause and request.choose_length(MAX_PACED_TOKENS) == 1:
                if not canvas.holes:
                    request.canvas = ()
                    alive = yield from self.decode_plain(request, edges)
                    canvas, edges = Canvas.from_request(request), [len(request) - 1, len(request)]
                    continue
            elif len(canvas) < limit and filled_share(canvas, *edges[-2:]) >= self.add:
                edges.append(min(edges[-1] + size, limit))
                canvas.append_slots(edges[-1] - len(canvas))
            if not canvas.holes:
                if len(canvas) >= limit:
                    break
                continue  # a block of fixed tokens only
            read = request.sample(step, scores=scores, score_as_drawn=True, joint=True)
            out = yield forward_of_holes(canvas, edges, read)
            step += 1
            chosen = self.choose_holes(canvas, edges, out)
            edges = edges[bisect_right(edges, canvas.prefix_length) - 1 :]  # full blocks are cached
            slots = canvas.fill_chosen(canvas.holes, chosen, out)
            if ends := [slot for slot in slots if canvas.ids[slot] in request.eos]:
                limit = len(canvas) if self.canvas else next(e for e in edges if e > min(ends))
                canvas.truncate(limit)
                edges = [edge for edge in edges if edge <= limit]
            if not self.canvas:
                alive = canvas.commit_until(request)
        if request.finish_reason is None and canvas.commit_until(request, len(canvas)):
            request.finish_reason = "length"

    def decode_plain(
        self, request: Request, edges: list[int]
    ) -> Generator[Forward, Prediction, bool]:
        """Run the uncached slots and decode the next token, and others while paused."""
        start, read = min(edges[0], len(request) - 1), request.sample()
        return decode_plain(request, start, read, block_pattern(edges, start, len(request)))

    def choose_holes(self, canvas: Canvas, edges: list[int], out: Prediction) -> IntArray:
        ranks, confidence = rank_scores(out, self.order), out.scores["confidence"]
        indices, first, previous_share = [], 0, 1.0
        for begin, end in pairwise(edges):
            last = first + len(canvas.holes_within(begin, end))
            chosen = select_block_holes(
                confidence[first:last],
                ranks[first:last],
                self.confidence,
                is_active=previous_share >= self.activate,
            )
            indices.append(first + chosen)
            first, previous_share = last, filled_share(canvas, begin, end)
        return np.concatenate(indices)
