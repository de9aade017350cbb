"""Diffusion models as their authors decode them: a planned number of holes in each forward."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from outpace.decoding import FULL, Canvas, Decoding, Forward, Prediction, Sample, Sequence
from outpace.decoding.canvas import blocks
from outpace.decoding.forward import FloatArray, IntArray
from outpace.decoding.order import Order, Rank, above, best, perturbed, rank, schedule, uniforms
from outpace.decoding.sampling import Reader, Readout, chooser
from outpace.methods.method import Method, at_least_one, check_blocks, nearest, one_of

Ends = Literal["free", "last", "never"]


@dataclass(frozen=True, kw_only=True)
class Diffusion(Method):
    """Show the whole canvas, fill the best few holes, show it again.

    The samplers of LLaDA (Nie et al., 2025, section 2.4) and Dream (Ye et al., 2025). `order` says
    which holes are filled next, `steps` in how many forwards all `max_tokens` would be (one token
    a forward by default), `block` how many tokens must be filled before those behind them. Options
    that are None are the model's own.

    The answer ends once everything up to an end-of-sequence is filled. With `canvas` all holes are
    filled, as in the authors' code.

    Attributes:
        eps: last time of Dream's schedule; 0 for the even one of LLaDA.
        order_temperature: above 0, holes are drawn by their scores (Dream's `alg_temp`).
        guidance: weight of classifier-free guidance; each step takes a second forward.
        ends: `last` fills what would end the answer after all else, `never` forbids the token that
            pads behind an answer (LLaDA's `confidence_eos_eot_inf` and `logits_eos_inf`).
    """

    bidirectional = True

    order: Order | None = None
    steps: int | None = None
    block: int | None = None
    eps: float | None = None
    order_temperature: float = 0.0
    guidance: float = 0.0
    ends: Ends = "free"
    canvas: bool = False

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, block=self.block)
        one_of(ends=(self.ends, Ends))
        if self.order is not None:
            one_of(order=(self.order, Order))
        if self.eps is not None and not 0 <= self.eps < 1:
            raise ValueError(f"eps must be at least 0 and below 1, not {self.eps}")
        for name in ("order_temperature", "guidance"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or positive, not {getattr(self, name)}")

    def check(self, seq: Sequence) -> None:
        """Raise `ValueError` for a request that these options do not fit."""
        check_blocks(seq, self.size(seq), whole=self.canvas)
        count = len(blocks(0, seq.max_tokens, self.size(seq)))
        if self.steps is not None and self.steps % count:
            raise ValueError(
                f"{count} blocks of {self.size(seq)} tokens cannot share steps={self.steps} "
                f"equally: use {nearest(self.steps, count)}"
            )
        if self.guidance and not seq.native.null_prompt:
            raise ValueError(
                f"guidance={self.guidance} needs a model that was trained to answer a prompt of "
                "masks; this one was not, so guidance must be 0"
            )

    def size(self, seq: Sequence) -> int:
        """Tokens of a block."""
        return self.block or min(seq.native.block or seq.max_tokens, seq.max_tokens)

    def decode(self, seq: Sequence) -> Decoding:
        """Fill block after block, as many holes at a time as the schedule says."""
        order = self.order or seq.native.order
        scores = tuple(score for score in get_args(Rank) if score == order)
        canvas = Canvas(seq.prompt, seq.mask_id)
        canvas.extend(seq.max_tokens)
        for step, (begin, end, count, share) in enumerate(self.plan(seq)):
            holes = canvas.within(begin, end)
            if not holes or (count == 0 and order != "origin"):
                continue
            read = seq.read(step, scores=scores, drawn=seq.native.drawn)
            out = yield from self.predict(seq, canvas, holes, read)
            luck = uniforms(seq.sampling.seed, step, holes)
            chosen = self.choose(order, out, count, share, luck)
            slots = [holes[index] for index in chosen]
            canvas.fill(slots, [out.tokens[index] for index in chosen])
            if not self.canvas and not canvas.settle(seq, slots):
                return
        seq.commit(canvas.ids[len(seq) :])

    def plan(self, seq: Sequence) -> Iterator[tuple[int, int, int, float]]:
        """Edges of the block of each step, how many holes it fills, and its share of those left."""
        edges = blocks(len(seq), seq.limit, self.size(seq))
        eps = seq.native.eps if self.eps is None else self.eps
        for begin, end in edges:
            steps = self.steps // len(edges) if self.steps else end - begin
            for count, share in schedule(end - begin, steps, eps):
                yield begin, end, count, share

    def choose(
        self, order: Order, out: Prediction, count: int, share: float, luck: FloatArray
    ) -> IntArray:
        """Indices of the holes to fill; `luck` is a uniform number for each hole."""
        match order:
            case "left_to_right":
                return np.arange(min(count, len(luck)))
            case "random":
                return best(luck, count)
            case "origin":
                return above(share - luck, 0)
        scores = rank(out, order)
        if self.order_temperature:
            scores = perturbed(scores, self.order_temperature, luck)
        return best(scores, count)

    def predict(
        self, seq: Sequence, canvas: Canvas, holes: list[int], read: Sample
    ) -> Generator[Forward, Prediction, Prediction]:
        """What the model says of the holes, moved by guidance and by what may end the answer."""
        null = None
        if self.guidance:
            prompt = len(seq.prompt)
            out = yield Forward(
                ids=[seq.mask_id] * prompt + canvas.ids[prompt:],
                start=0,
                mask=FULL,
                predict=holes,
                read=Sample(keep=True),
            )
            null = out.logits
        if self.guidance or self.ends != "free":
            read = Moved(
                **vars(read),
                null=null,
                guidance=self.guidance,
                never=seq.padding if self.ends == "never" else (),
                last=tuple(seq.eos) if self.ends == "last" else (),
            )
        return (yield Forward(ids=canvas.ids, start=0, mask=FULL, predict=holes, read=read))


@dataclass(frozen=True, kw_only=True)
class Moved(Sample):
    """Tokens of logits that were moved first.

    With `null [r, vocab]`, the logits of the same slots behind a prompt of masks, they are moved
    away from these by `guidance`. Tokens in `never` are not drawn; those in `last` are, but count
    for nothing in the scores, and holes that take them come behind all others.
    """

    null: Tensor | None = None
    guidance: float = 0.0
    never: tuple[int, ...] = ()
    last: tuple[int, ...] = ()

    @classmethod
    def group(cls, reads: Many[Self], slots: Many[Many[int]], device: torch.device) -> Reader:
        """Reader of all rows of `reads`, where read i wants the slots `slots[i]`."""
        choose = chooser([r.sampling for r in reads], [r.step for r in reads], slots, device)
        judge = cls.judge(reads, slots, device)
        ends = [0, *accumulate(map(len, slots))]
        spans = list(zip(reads, ends, ends[1:], strict=False))

        def read(logits: Tensor, rows: slice) -> Readout:
            logits = logits.clone()
            parts = []
            for each, begin, end in spans:
                own = slice(max(begin, rows.start), min(end, rows.stop))
                if own.start < own.stop:
                    part = logits[own.start - rows.start : own.stop - rows.start]
                    parts.append((each, part))
                    if each.null is not None:
                        null = each.null[own.start - begin : own.stop - begin]
                        part.sub_(null).mul_(1 + each.guidance).add_(null)
                    part[:, list(each.never)] = -torch.inf
            tokens = choose(logits, rows)
            for each, part in parts:
                part[:, list(each.last)] = -torch.inf
            scores = judge(logits, tokens, rows)
            ended = logits.gather(-1, tokens[:, None]).squeeze(-1) == -torch.inf
            for name, score in scores.items():
                score[ended] = torch.inf if name == "entropy" else -torch.inf
            return Readout(tokens, scores)

        return read
