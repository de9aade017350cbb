"""Discrete diffusion forcing: a block-causal student of a model that sees everything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.ranges import groups, whole
from outpace.decoding.blocks import CONFIDENCE, SIZE
from outpace.decoding.target import Kind
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.kinds import Bounds, Count, Share, TokenId, Weight, Whole, check_bounds
from outpace.training.noise import Response, check_canvas, holes, padded
from outpace.training.objective import (
    Loss,
    Models,
    Objective,
    Targets,
    by_parts,
    cross_entropy,
    mean,
    scored,
)
from outpace.training.pipeline import Pipeline
from outpace.training.rows import Floats, Rows
from outpace.training.sights import hidden_states, over_rows


@dataclass(frozen=True, kw_only=True)
class D2F(Objective):
    """Asymmetric distillation of discrete diffusion forcing (Wang et al., 2025, section 4).

    The prompt is one group that sees itself; blocks of the response follow, each of which sees
    itself and what lies before it. Later blocks are masked more. The student learns the
    distribution that the teacher, its own weights from before the training, gives to a hole when
    it sees all of the same noisy tokens. With the defaults the direction of the divergence and the
    weight 1/p of a hole are those of the authors' code.

    Attributes:
        block: tokens of a block; the last one may be shorter.
        canvas: smallest and largest length that the response is padded to with end tokens, drawn
            for each example; by default it is not padded.
        noise: bounds of the share that is masked. The first block's is uniform between them; those
            of later blocks rise from it by random steps, to halfway to the upper bound on average.
        monotone: without it each block has a share of its own, uniform between the bounds: what the
            paper compares with in its Table 4.
        hard: share of the true token in what a hole learns; 1 is training without a teacher.
        reverse: learn KL(student || teacher), as equation 3 of the paper has it, where the code has
            the cross-entropy to the teacher.
        easy: share of examples whose unmarked tokens are masked less, by a factor uniform between 0
            and 1: what decoding meets once it has filled the easy holes (see `Data.mark`).
        unroll: learn the states that the student meets in so many forwards of pipelined decoding,
            instead of random noise: all tokens are holes at first, and after each forward those
            that decoding would fill are filled, with their true tokens. 0 is random noise.
        confidence: of the tokens that are filled so.
        end_blocks: whether blocks that are nothing but padding are scored.
        mark_weight: weight of marked tokens (see `Data.mark`).
        shift: 1 where row p - 1 scores slot p, 0 where row p does; taken from the model.
        mask_id: the token of a hole; taken from the model.
    """

    method: ClassVar[str | None] = "d2f"

    block: Count = SIZE
    canvas: tuple[Count, Count] | None = None
    noise: tuple[Share, Share] = (0.2, 0.7)
    monotone: bool = True
    hard: Share = 0.0
    reverse: bool = False
    easy: Share = 0.0
    unroll: Whole = 0
    confidence: Share = CONFIDENCE
    end_blocks: bool = True
    mark_weight: Weight = 1.0
    shift: Annotated[int, Bounds(0, 1)] | None = None
    mask_id: TokenId | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if not 0 < self.noise[0] <= self.noise[1] <= 1:
            raise ValueError(f"noise takes two shares above 0, the smaller first, not {self.noise}")
        if self.unroll and self.easy:
            raise ValueError("easy is for random noise; unroll has none, so set one of them to 0")
        if self.unroll and not self.monotone:
            raise ValueError("monotone is for random noise; unroll has none: leave one of them out")
        if self.reverse and self.hard:
            raise ValueError(f"reverse needs a teacher that doubts: set hard to 0, not {self.hard}")
        check_canvas(self.canvas)

    @property
    def taught(self) -> bool:
        """Whether the loss needs the teacher."""
        return self.hard < 1

    @property
    def forwards(self) -> int:
        """One for each state that is learnt."""
        return max(self.unroll, 1)

    @property
    def even(self) -> bool:
        """Unrolled decoding ends when all is filled."""
        return not self.unroll

    @property
    def once(self) -> Self:
        """The first state only."""
        return replace(self, unroll=min(self.unroll, 1))

    def bind(self, config: ModelConfig) -> Self:
        """Take shift and mask token from the model, which must be a diffusion model."""
        if config.kind is not Kind.DIFFUSION:
            raise ValueError(
                f"d2f trains a student of a diffusion model, which {config.architecture} is not; "
                "train one with mdlm first"
            )
        if self.block >= config.max_length:
            raise ValueError(
                f"block {self.block} leaves no room for a prompt in the {config.max_length} "
                "tokens that the model was made for"
            )
        return replace(self, shift=config.shift, mask_id=config.mask_id)

    def rows(self, example: Example, rng: Generator) -> Rows:
        """Prompt and noisy blocks."""
        answer = padded(example, self.canvas, rng, mark_weight=self.mark_weight)
        blocks = -(-len(answer) // self.block)
        if self.unroll:
            return self.noisy(example.prompt, answer, np.ones(blocks), np.zeros(len(answer)))
        shares = self.shares(rng.random(), rng.random(blocks - 1))
        draws = rng.random(len(answer))
        if rng.random() < self.easy:
            draws[~answer.marked] /= rng.random()
        return self.noisy(example.prompt, answer, shares, draws)

    def shares(self, first: float, rises: Floats) -> Floats:
        """Share that is masked of each block, from uniform draws: one, and one for each rise."""
        low, high = self.noise
        if not self.monotone:
            return low + (high - low) * np.append(first, rises)
        share = low + (high - low) * first
        steps = rises * (high - share) / max(len(rises), 1)
        return share + np.append(0.0, np.cumsum(steps))

    def noisy(self, prompt: list[int], answer: Response, shares: Floats, draws: Floats) -> Rows:
        """Mask where a uniform draw is below the share of its block, at least one token."""
        assert self.shift is not None and self.mask_id is not None, "bind the objective first"
        places = np.arange(len(answer))
        number = places // self.block
        # Slot 0 has no row before it, so a shifted model is never asked for it.
        asked = places + len(prompt) >= self.shift
        masked = (draws < shares[number]) & asked
        learnt = asked if self.end_blocks else asked & (number * self.block < answer.ends)
        if not (masked & learnt).any():
            masked[np.where(learnt, draws, 2.0).argmin()] = True
        worth = np.where(masked & learnt, answer.worth, 0.0)
        given = (len(prompt), 0)
        lengths = [len(prompt), *np.bincount(number).tolist()]
        rows = holes(
            np.append(np.array(prompt, dtype=np.int64), answer.tokens),
            np.pad(masked, given),
            np.pad(worth / shares[number], given),
            groups([length for length in lengths if length]),
            shift=self.shift,
            mask_id=self.mask_id,
        )
        rows.mass = float(worth.sum())
        return rows

    def loss(self, models: Models, rows: Rows) -> Loss:
        """Cross-entropy of the student's holes to what they learn, of one state or of many."""
        if self.unroll:
            return self.unrolled(models, rows)
        hidden = hidden_states(models.trained, rows)
        return self.loss_of(models, hidden, rows)

    def unrolled(self, models: Models, rows: Rows) -> Loss:
        """The mean loss of the states that decoding goes through."""
        assert self.shift is not None, "bind the objective first"
        pipeline = Pipeline(rows, self.shift)
        attend = over_rows(models.trained.config, rows.ranges, rows.ids.device)
        losses: list[Loss] = []
        for number in range(self.unroll):
            state = pipeline.append()
            holes = scored(state)
            if not len(holes):
                break
            hidden = models.trained(state.ids, state.positions, attend)
            losses.append(self.loss_of(models, hidden, state))
            if number + 1 == self.unroll:
                break
            pipeline.fill(self.sure(models, hidden, holes), self.confidence)
        return mean(losses)

    def loss_of(self, models: Models, hidden: Tensor, rows: Rows) -> Loss:
        """The loss of the holes of one state."""
        targets = self.targets(models, rows)
        return cross_entropy(models.trained, hidden, rows, targets, reverse=self.reverse)

    @staticmethod
    @torch.no_grad()
    def sure(models: Models, hidden: Tensor, places: Tensor) -> Tensor:
        """Probability of the most probable token of each hole, `f32[holes]`."""
        model = models.trained

        def score(places: Tensor) -> tuple[Tensor]:
            return (model.head(hidden[places]).float().softmax(dim=-1).amax(dim=-1),)

        return by_parts(score, places, model.config.vocab)[0]

    def targets(self, models: Models, rows: Rows) -> Targets | None:
        """What scored rows learn; None where it is their labels."""
        if not self.taught:
            return None
        teacher = models.others["teacher"]
        with torch.no_grad():
            hidden = hidden_states(teacher, replace(rows, ranges=whole(rows.ranges)))

        @torch.no_grad()
        def soft(places: Tensor) -> Tensor:
            law = teacher.head(hidden[places]).float().softmax(dim=-1)
            if not self.hard:
                return law
            true = F.one_hot(rows.labels[places], law.shape[-1]).to(law.dtype)
            return law.lerp(true, self.hard)

        return soft
