"""The authors' samplers of diffusion models: a planned number of holes per forward."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal, Self, get_args

import numpy as np
import torch
from torch import Tensor

from outpace.decoding import (
    FULL,
    Canvas,
    Decoding,
    Forward,
    Kind,
    OptionError,
    Prediction,
    Request,
    Sample,
)
from outpace.decoding.canvas import split_blocks
from outpace.decoding.forward import FloatArray, IntArray
from outpace.decoding.order import (
    above_threshold,
    even_counts,
    perturb_scores,
    rank_scores,
    slot_uniforms,
    step_schedule,
    top_holes,
)
from outpace.decoding.sampling import GroupReader, Readout, token_scores
from outpace.decoding.sampling_params import check_temperature
from outpace.decoding.target import HoleOrder, Rank
from outpace.field_types import Bounds, NonNegativeFloat, PositiveInt
from outpace.methods.method import Method


@dataclass(frozen=True, kw_only=True)
class AdjustedSample(Sample):
    """Tokens sampled from adjusted logits."""

    null: Tensor | None = None
    """`[r, vocab]` logits of the same slots after a prompt of masks, for guidance."""
    guidance: float = 0.0
    """Weight by which logits are moved away from `null`."""
    never: tuple[int, ...] = ()
    """Tokens that are banned."""
    last: tuple[int, ...] = ()
    """Tokens that are excluded from the scores; holes that choose them are filled last."""

    @classmethod
    def make_reader(
        cls, reads: Sequence[Self], slots: Sequence[Sequence[int]], device: torch.device
    ) -> GroupReader:
        choose = cls.make_chooser(reads, slots, device)
        judge = cls.make_scorer(reads, slots, device)
        wanted = {score for each in reads for score in each.scores if score == "logprob"}
        ends = [0, *accumulate(map(len, slots))]
        spans = list(zip(reads, ends, ends[1:], strict=False))

        def read_chunk(logits: Tensor, rows: slice) -> Readout:
            logits = logits.to(torch.float32, copy=True)
            parts = []
            for each, begin, end in spans:
                overlap = slice(max(begin, rows.start), min(end, rows.stop))
                if overlap.start < overlap.stop:
                    part = logits[overlap.start - rows.start : overlap.stop - rows.start]
                    parts.append((each, part))
                    if each.null is not None:
                        null = each.null[overlap.start - begin : overlap.stop - begin]
                        part.sub_(null).mul_(1 + each.guidance).add_(null)
                    ban_tokens(part, each.never)
            tokens = choose(logits, rows)
            raw = token_scores(logits, tokens, wanted)
            for each, part in parts:
                ban_tokens(part, each.last)
            judged = judge(logits, tokens, rows)
            ended = logits.gather(-1, tokens[:, None]).squeeze(-1) == -torch.inf
            for name, score in judged.items():
                score.masked_fill_(ended, torch.inf if name == "entropy" else -torch.inf)
            return Readout(tokens, judged | raw)

        return read_chunk


def ban_tokens(logits: Tensor, tokens: Sequence[int]) -> None:
    """Set tokens of `logits [r, V]` to minus infinity, one by one, without synchronising."""
    for token in tokens:
        logits[:, token] = -torch.inf


EndRule = Literal["free", "last", "never"]

MAX_STEPS_PER_TOKEN = 16
"""Most steps of a schedule per token: finer schedules only add steps that fill nothing."""


@dataclass(frozen=True, kw_only=True)
class Diffusion(Method):
    """Run the whole canvas, fill the best few holes, repeat.

    The samplers of LLaDA (Nie et al., 2025, section 2.4) and Dream (Ye et al., 2025). `order` ranks
    the holes. `steps` is the number of forwards for all `max_tokens` (one token per forward by
    default). `block` is the number of tokens that must be filled before those after them. Options
    that are None use the model's defaults.

    The answer ends once everything up to an end-of-sequence is filled. With `canvas` all holes are
    filled, as in the authors' code.
    """

    target_kinds = (Kind.DIFFUSION,)

    order: Annotated[HoleOrder | None, "which holes are filled next"] = None
    steps: Annotated[PositiveInt | None, "forwards in which all of max_tokens would be filled"] = (
        None
    )
    block: Annotated[
        PositiveInt | None, "tokens that must all be filled before those after them"
    ] = None
    eps: Annotated[
        float | None,
        Bounds(0, 1, below=True),
        "last time of Dream's schedule; 0 for the even one of LLaDA",
    ] = None
    # Dream's `alg_temp`.
    order_temperature: Annotated[NonNegativeFloat, "above 0, holes are drawn by their scores"] = 0.0
    guidance: Annotated[
        NonNegativeFloat,
        "weight of classifier-free guidance, at the cost of a second forward per step",
    ] = 0.0
    # LLaDA's `confidence_eos_eot_inf` and `logits_eos_inf`.
    ends: Annotated[
        EndRule, "last fills end-of-sequence tokens after all others, never bans the padding token"
    ] = "free"
    canvas: Annotated[bool, "fill all holes in steps forwards"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(order_temperature=self.order_temperature)

    def check_request(self, request: Request) -> None:
        if self.guidance and not request.target.null_prompt:
            raise OptionError(
                "guidance",
                self.guidance,
                "must be 0 with a model that was not trained on prompts of masks",
            )

    def block_size(self, request: Request) -> int:
        """Return the number of tokens of a block; the last one of an answer may have fewer."""
        return self.block or request.target.block or request.max_tokens

    @property
    def is_sequential(self) -> bool:
        return False

    def decode(self, request: Request) -> Decoding:
        """Fill block after block, following the schedule."""
        order = self.order or request.target.order
        scores = tuple(score for score in get_args(Rank) if score == order)
        canvas = Canvas.from_request(request)
        canvas.append_slots(request.max_tokens)
        for step, (begin, end, count, share) in enumerate(self.plan_steps(request, canvas)):
            holes = canvas.holes_within(begin, end)
            if not holes or (count == 0 and order != "origin"):
                continue
            read = request.sample(
                step, scores=scores, score_as_drawn=request.target.score_as_drawn, joint=True
            )
            out = yield from self.predict_holes(request, canvas, holes, read)
            noise = slot_uniforms(request.sampling.seed, step, holes)
            chosen = self.choose_holes(order, out, count, share, noise)
            slots = canvas.fill_chosen(holes, chosen, out)
            if not self.canvas and not canvas.commit_prefix(request, slots):
                return
        canvas.commit_until(request, len(canvas))

    def plan_steps(self, request: Request, canvas: Canvas) -> Iterator[tuple[int, int, int, float]]:
        """Yield edges of the block, number of holes and share of the rest of each step."""
        edges = split_blocks(len(request), request.limit, self.block_size(request))
        eps = request.target.eps if self.eps is None else self.eps
        block_steps = even_counts(
            min(self.steps or 0, MAX_STEPS_PER_TOKEN * request.max_tokens), len(edges)
        )
        for (begin, end), num_steps in zip(edges, block_steps, strict=True):
            holes = len(canvas.holes_within(begin, end))
            steps = max(num_steps, 1) if self.steps else holes
            for count, share in step_schedule(holes, steps, eps) if holes else ():
                yield begin, end, count, share

    def choose_holes(
        self, order: HoleOrder, out: Prediction, count: int, share: float, luck: FloatArray
    ) -> IntArray:
        """Return the indices of the holes to fill; `luck` is a uniform number per hole."""
        match order:
            case "left_to_right":
                return np.arange(min(count, len(luck)))
            case "random":
                return top_holes(luck, count)
            case "origin":
                return above_threshold(share - luck, 0)
        scores = rank_scores(out, order)
        if self.order_temperature:
            scores = perturb_scores(scores, self.order_temperature, luck)
        return top_holes(scores, count)

    def predict_holes(
        self, request: Request, canvas: Canvas, holes: list[int], read: Sample
    ) -> Generator[Forward, Prediction, Prediction]:
        null = None
        if self.guidance:
            prompt = len(request.prompt)
            out = yield Forward(
                ids=[request.target.mask_id] * prompt + canvas.ids[prompt:],
                start=0,
                pattern=FULL,
                predict=holes,
                read=Sample(keep=True),
            )
            null = out.logits
        if self.guidance or self.ends != "free":
            read = AdjustedSample(
                **vars(read),
                null=null,
                guidance=self.guidance,
                never=request.target.padding if self.ends == "never" else (),
                last=tuple(request.eos) if self.ends == "last" else (),
            )
        return (yield Forward(ids=canvas.ids, start=0, pattern=FULL, predict=holes, read=read))
