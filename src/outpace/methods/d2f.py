"""Discrete diffusion forcing: a pipeline of blocks, filled while those before them still are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np

from outpace.decoding import (
    Canvas,
    Decoding,
    Dial,
    Forward,
    Kind,
    OptionError,
    Prediction,
    Request,
    Target,
)
from outpace.decoding.blocks import ACTIVATE, ADD, CONFIDENCE, SIZE, taken
from outpace.decoding.dial import MOST
from outpace.decoding.forward import IntArray
from outpace.decoding.order import rank
from outpace.decoding.target import Rank
from outpace.methods.bounds import at_least_one, fraction
from outpace.methods.method import Among, Method, Within, own_block
from outpace.methods.plain import plain


@dataclass(frozen=True, kw_only=True)
class D2F(Method):
    """Fill several blocks at once; each sees those before it, and keeps its keys once it is full.

    The pipelined decoding of "Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete
    Diffusion Forcing" (Wang et al., 2025, section 3.3). A block is appended once the last one is
    filled to `add`. Blocks take all tokens of more than `confidence`; where there is none, a block
    takes its best one by `order`, provided that the one before it is filled to `activate`. An
    end-of-sequence ends appending, and blocks behind it are dropped; `canvas` fills them as well,
    and has whole blocks only, as in the authors' code. With `least` 1 a `Pace` may let it decode
    token by token, without a mask, where the text is to depend on the load and the last token's row
    says the next one. Raises `ValueError` for bad options.
    """

    decodes = (Kind.DIFFUSION, Kind.BLOCK)
    usual = {"temperature": 0.0, "top_p": 1.0}

    block: Annotated[
        int | None,
        Among((8, 16, 32)),
        "slots of a block; those of a block diffusion model by default, or 16",
    ] = None
    add: Annotated[
        float,
        Within(0.05, 1),
        "share of the last block that is filled when the next one is appended",
    ] = ADD
    activate: Annotated[
        float,
        Within(0.5, 1),
        "share of a block that is filled when the next one takes a token in every forward",
    ] = ACTIVATE
    confidence: Annotated[
        float,
        Within(0.5, 0.999),
        "tokens of a higher probability are taken; 1: one token per forward",
    ] = CONFIDENCE
    order: Annotated[Rank, "which token is best where none is sure"] = "confidence"
    canvas: Annotated[bool, "fill everything that was appended, and whole blocks only"] = False
    least: Annotated[
        int | None,
        "1: with pace=auto, tokens may be said one by one, without a mask, on Dream; "
        "None: they are not",
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(block=self.block)
        fraction(add=self.add, activate=self.activate, confidence=self.confidence)
        if self.least not in (None, 1):
            message = f"least must be 1 (token by token) or None, not {self.least}"
            raise OptionError("least", self.least, message)

    def dial(self, target: Target, *, auto: bool) -> Dial | None:
        """Whether blocks are appended, or one token is said after the other."""
        if not auto or self.least is None or target.shift != 1 or target.blocked or self.canvas:
            return None
        size = self.block or SIZE
        return Dial(
            values=(1, MOST),
            # Masks of a block, what was kept of it, and the masks of those that are appended early.
            passes=lambda value, kept: [
                ("target", 1 if value == 1 else size + kept * (2 - self.add), 1)
            ],
            nested=False,
        )

    def check(self, request: Request) -> None:
        """Raise `ValueError` where nobody says how long the blocks of the model are."""
        self.edges(request)

    def edges(self, request: Request) -> tuple[list[int], int]:
        """Edges of the blocks that the prompt fills, and tokens of a block.

        A block diffusion model counts them from slot 0; else the prompt is one block.
        """
        if not request.target.blocked:
            return [0, len(request)], self.block or SIZE
        size = own_block(request, self.block)
        return list(range(0, len(request) + 1, size)), size

    @property
    def sequential(self) -> bool:
        """Holes are filled in any order."""
        return False

    def decode(self, request: Request) -> Decoding:
        """Feed the blocks in flight, fill some of their holes, commit what has none before it."""
        canvas, (edges, size) = Canvas.of(request), self.edges(request)
        whole = self.canvas and not request.cloze  # a text that is given ends where it ends
        limit = request.limit - ((request.limit - edges[-1]) % size if whole else 0)
        scores = tuple(dict.fromkeys(("confidence", self.order)))
        step, alive = 0, True
        while alive:
            if request.pace and not request.cloze and request.dial(MOST) == 1:
                if not canvas.holes:
                    request.canvas = ()
                    alive = yield from self.plain(request, edges)
                    canvas, edges = Canvas.of(request), [len(request) - 1, len(request)]
                    continue
            elif len(canvas) < limit and full(canvas, *edges[-2:]) >= self.add:
                edges.append(min(edges[-1] + size, limit))
                canvas.extend(edges[-1] - len(canvas))
            if not canvas.holes:
                if len(canvas) >= limit:
                    break
                continue  # a block of nothing but tokens that are given
            # The row before the first hole may be the one that predicts it; full blocks behind
            # the last hole are seen by nobody.
            start = min(edges[0], canvas.filled - 1)
            end = next(edge for edge in edges if edge > canvas.holes[-1])
            bounds = [start, *(edge for edge in edges if start < edge <= end)]
            out = yield Forward(
                ids=canvas.ids[start:end],
                start=start,
                pattern=tuple(stop - begin for begin, stop in pairwise(bounds)),
                predict=tuple(canvas.holes),
                read=request.sample(step, scores=scores, drawn=True, joint=True),
            )
            step += 1
            taken = self.taken(canvas, edges, out)
            edges = edges[bisect_right(edges, canvas.filled) - 1 :]  # what was fed whole is kept
            slots = canvas.take(canvas.holes, taken, out)
            if ends := [slot for slot in slots if canvas.ids[slot] in request.eos]:
                limit = len(canvas) if self.canvas else next(e for e in edges if e > min(ends))
                canvas.cut(limit)
                edges = [edge for edge in edges if edge <= limit]
            if not self.canvas:
                alive = canvas.commit(request)
        if request.finish_reason is None and canvas.commit(request, len(canvas)):
            request.finish_reason = "length"

    def plain(self, request: Request, edges: list[int]) -> Generator[Forward, Prediction, bool]:
        """Feed what is not fed whole yet and say the next token, and others while a pace rests."""
        start, read = min(edges[0], len(request) - 1), request.sample()
        stops = [start, *(edge for edge in edges if start < edge)]
        return plain(request, start, read, tuple(stop - at for at, stop in pairwise(stops)))

    def taken(self, canvas: Canvas, edges: list[int], out: Prediction) -> IntArray:
        """Which of the holes are filled, as their places among the holes."""
        ranks, confidence = rank(out, self.order), out.scores["confidence"]
        places, first, before = [], 0, 1.0
        for begin, end in pairwise(edges):
            last = first + len(canvas.within(begin, end))
            sure, forced = confidence[first:last], before >= self.activate
            chosen = taken(sure, ranks[first:last], self.confidence, forced=forced)
            places.append(first + chosen)
            first, before = last, full(canvas, begin, end)
        return np.concatenate(places)


def full(canvas: Canvas, begin: int, end: int | None = None) -> float:
    """Share of the slots of a block that are filled; all of them before the first one."""
    if end is None:
        return 1.0
    size = end - begin
    return (size - len(canvas.within(begin, end))) / size
