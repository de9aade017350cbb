"""Discrete diffusion forcing: distils a bidirectional diffusion model to a block-causal one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional as F

from outpace.attention.ranges import document_ranges, find_documents, grouped_ranges
from outpace.decoding.order import (
    D2F_ACTIVATE,
    D2F_ADD,
    D2F_BLOCK_SIZE,
    D2F_CONFIDENCE,
    select_block_holes,
)
from outpace.decoding.target import Kind
from outpace.errors import OptionError
from outpace.field_types import Bounds, Count, Fraction, NonNegativeInt, TokenId, Weight
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.layer_attention import hidden_states, plan_row_attention
from outpace.training.objective import (
    Loss,
    Models,
    Objective,
    TargetFunction,
    cross_entropy,
    mean_loss,
    score_in_chunks,
    scored_places,
)
from outpace.training.rows import (
    UNSCORED,
    Floats,
    Response,
    Rows,
    check_canvas,
    masked_rows,
    pad_response,
)


class Pipeline:
    """Initially fully masked responses, filled with their true tokens as decoding would."""

    def __init__(self, rows: Rows, shift: int) -> None:
        """Find the blocks of rows whose response tokens are all masked and scored."""
        self.rows, self.shift = rows, shift
        self.places = torch.nonzero(rows.labels != UNSCORED).squeeze(1)
        """`i64[holes]`, rows that predict the holes."""
        slots = self.places.cpu() + shift
        _, number, sizes = torch.unique_consecutive(
            rows.ranges[slots, 0, 1], return_inverse=True, return_counts=True
        )
        ends = torch.tensor([end for _, end in find_documents(rows.ranges)])
        document = torch.bucketize(slots, ends, right=True)
        owner = document[sizes.cumsum(0) - 1]
        leads = torch.ones(len(sizes), dtype=torch.bool)
        leads[1:] = owner[1:] != owner[:-1]
        device = self.places.device
        self.block_numbers, self.sizes, self.is_first = (
            t.to(device) for t in (number, sizes, leads)
        )
        """`i64[holes]`, `i64[blocks]` and `bool[blocks]`: the last is the first of a response."""
        self.unfilled = torch.ones_like(self.places, dtype=torch.bool)
        """`bool[holes]`, whether a hole is still masked."""
        self.appended = torch.zeros_like(self.is_first)
        """`bool[blocks]`, whether a block has been appended."""

    def append_blocks(self) -> Rows:
        """Append a block to each response whose last block is filled enough; return the state.

        Holes of appended blocks are scored, weighted by the inverse of their block's masked
        fraction.
        """
        filled = self.filled_fraction()
        self.appended |= self.is_first | (self.appended & (filled >= D2F_ADD)).roll(1)
        self.open_holes = torch.nonzero(self.unfilled & self.appended[self.block_numbers]).squeeze(
            1
        )
        ids, labels = self.rows.ids.clone(), torch.full_like(self.rows.labels, UNSCORED)
        done, places = self.places[~self.unfilled], self.places[self.open_holes]
        ids[done + self.shift] = self.rows.labels[done]
        labels[places] = self.rows.labels[places]
        weights = self.rows.weights.clone()
        weights[places] /= (1 - filled)[self.block_numbers[self.open_holes]]
        return replace(self.rows, ids=ids, labels=labels, weights=weights)

    def fill_holes(self, scores: Tensor, confidence: float) -> None:
        """Fill the holes that decoding would fill, given their scores `f32[scored]`."""
        forced = (self.is_first | (self.filled_fraction() >= D2F_ACTIVATE).roll(1)).tolist()
        counts = self.block_numbers[self.open_holes].bincount(minlength=len(self.sizes)).tolist()
        for holes, sure, is_forced in zip(
            self.open_holes.split(counts), scores.cpu().split(counts), forced, strict=True
        ):
            chosen = select_block_holes(sure.numpy(), sure.numpy(), confidence, is_active=is_forced)
            self.unfilled[holes[torch.from_numpy(chosen)]] = False

    def filled_fraction(self) -> Tensor:
        return (
            1
            - torch.bincount(self.block_numbers[self.unfilled], minlength=len(self.sizes))
            / self.sizes
        )


@dataclass(frozen=True, kw_only=True)
class D2F(Objective):
    """Asymmetric distillation of discrete diffusion forcing (Wang et al., 2025, section 4).

    The prompt attends to itself; each response block attends to the prompt, earlier blocks and
    itself. Later blocks are masked more. The student is trained on the distributions of the
    teacher, a copy of its initial weights with full attention over the same noisy tokens. By
    default, the direction of the divergence and the weight 1/p of a masked token follow the
    authors' code.
    """

    method: ClassVar[str | None] = "d2f"

    block: Count = D2F_BLOCK_SIZE
    """Tokens per block; the last one may be shorter."""
    canvas: tuple[Count, Count] | None = None
    """Minimum and maximum length to which the response is padded with end tokens, drawn per
    example; by default it is not padded."""
    padding: bool = True
    """Whether end tokens at the end of a response are masked and scored. If not, the noise rises up
    to the token before them, as in a later version of the authors' code (branch
    `loss-without-eospadding`, for Dream)."""
    noise: tuple[Fraction, Fraction] = (0.2, 0.7)
    """Bounds of the masked fraction. The first block's is uniform between them; later ones rise by
    random steps, on average to halfway to the upper bound."""
    monotone: bool = True
    """If false, each block's fraction is drawn independently, the baseline in Table 4 of the paper.
    """
    hard: Fraction = 0.0
    """Weight of the true token in the target distribution; 1 trains without a teacher."""
    reverse: bool = False
    """Minimize KL(student || teacher) as in equation 3 of the paper, instead of the cross-entropy
    to the teacher as in the authors' code."""
    easy: Fraction = 0.0
    """Fraction of examples whose unmarked tokens are masked less, by a factor uniform in [0, 1], as
    when decoding has filled the easy positions first (see `Data.mark`)."""
    unroll: NonNegativeInt = 0
    """Number of forwards of pipelined decoding whose states replace random noise: all tokens start
    masked, and after each forward those that decoding would fill are filled with their true
    tokens. 0 uses random noise."""
    confidence: Fraction = D2F_CONFIDENCE
    """Confidence threshold of this simulated decoding."""
    mark_weight: Weight = 1.0
    """Weight of marked tokens (see `Data.mark`)."""
    shift: Annotated[int, Bounds(0, 1)] | None = None
    """1 if row p - 1 predicts slot p, 0 if row p does; set by the model."""
    mask_id: TokenId | None = None
    """The mask token; set by the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.noise[0] <= self.noise[1] <= 1:
            raise OptionError(
                "noise", self.noise, "must be two fractions above 0 in ascending order"
            )
        if self.unroll and self.easy:
            raise ValueError("easy cannot be combined with unroll; set one of them to 0")
        if self.unroll and not self.monotone:
            raise ValueError("monotone = false cannot be combined with unroll; remove one of them")
        if self.reverse and self.hard:
            raise OptionError("hard", self.hard, "must be 0 with reverse")
        check_canvas(self.canvas)

    @property
    def needs_teacher(self) -> bool:
        return self.hard < 1

    @property
    def has_fixed_forwards(self) -> bool:
        """False for unrolled decoding, which stops when all positions are filled."""
        return not self.unroll

    def bind(self, config: ModelConfig) -> Self:
        """Set shift and mask token; `ValueError` unless it is a diffusion model."""
        if config.kind is not Kind.DIFFUSION:
            raise ValueError(
                f"d2f needs a diffusion model, and {config.architecture} is not one; train one "
                "with mdlm first"
            )
        if self.block >= config.max_length:
            length = config.max_length
            raise OptionError("block", self.block, f"must be below the model's length of {length}")
        return replace(self, shift=config.shift, mask_id=config.mask_id)

    def rows(self, example: Example, rng: Generator) -> Rows:
        answer = pad_response(example, self.canvas, rng, mark_weight=self.mark_weight)
        length = len(answer)
        if example.ended and not self.padding:
            text = np.flatnonzero(answer.tokens != answer.tokens[-1])
            length = int(text[-1]) + 1 if len(text) else 1
        blocks = -(-length // self.block)
        if self.unroll:
            return self.noisy_rows(example.prompt, answer, np.ones(blocks), np.zeros(length))
        shares = self.block_fractions(rng.random(), rng.random(blocks - 1))
        draws = rng.random(length)
        if rng.random() < self.easy:
            draws[~answer.marked[:length]] /= rng.random()
        return self.noisy_rows(example.prompt, answer, shares, draws)

    def block_fractions(self, first: float, rises: Floats) -> Floats:
        low, high = self.noise
        if not self.monotone:
            return low + (high - low) * np.append(first, rises)
        share = low + (high - low) * first
        steps = rises * (high - share) / max(len(rises), 1)
        return share + np.append(0.0, np.cumsum(steps))

    def noisy_rows(
        self, prompt: list[int], answer: Response, shares: Floats, draws: Floats
    ) -> Rows:
        """Mask tokens whose uniform draw is below their block's fraction, at least one token.

        Tokens without a draw, at the end, stay unmasked.
        """
        assert self.shift is not None and self.mask_id is not None, "bind the objective first"
        draws = np.pad(draws, (0, len(answer) - len(draws)), constant_values=np.inf)
        places = np.arange(len(answer))
        number = places // self.block
        shares = np.append(shares, np.ones(number[-1] + 1))
        # Slot 0 has no row before it, so a shifted model cannot predict it.
        predictable = places + len(prompt) >= self.shift
        masked = (draws < shares[number]) & predictable
        if not masked.any():
            masked[np.where(predictable, draws, np.inf).argmin()] = True
        weights = np.where(masked, answer.token_weights, 0.0)
        padding = (len(prompt), 0)
        lengths = [len(prompt), *np.bincount(number).tolist()]
        rows = masked_rows(
            np.append(np.array(prompt, dtype=np.int64), answer.tokens),
            np.pad(masked, padding),
            np.pad(weights / shares[number], padding),
            grouped_ranges([length for length in lengths if length]),
            shift=self.shift,
            mask_id=self.mask_id,
        )
        rows.normaliser = float(weights.sum())
        return rows

    def loss(self, models: Models, rows: Rows) -> Loss:
        """Compute the loss of masked positions, in one noisy state or in unrolled states."""
        if self.unroll:
            return self.unrolled_loss(models, rows)
        hidden = hidden_states(models.trained, rows)
        return self.state_loss(models, hidden, rows)

    def unrolled_loss(self, models: Models, rows: Rows) -> Loss:
        assert self.shift is not None, "bind the objective first"
        pipeline = Pipeline(rows, self.shift)
        attend = plan_row_attention(models.trained.config, rows.ranges, rows.ids.device)
        losses: list[Loss] = []
        for number in range(self.unroll):
            state = pipeline.append_blocks()
            holes = scored_places(state)
            if not len(holes):
                break
            hidden = models.trained(state.ids, state.positions, attend)
            losses.append(self.state_loss(models, hidden, state))
            if number + 1 == self.unroll:
                break
            pipeline.fill_holes(self.top_probabilities(models, hidden, holes), self.confidence)
        return mean_loss(losses)

    def state_loss(self, models: Models, hidden: Tensor, rows: Rows) -> Loss:
        targets = self.teacher_targets(models, rows)
        return cross_entropy(models.trained, hidden, rows, targets, reverse=self.reverse)

    @staticmethod
    @torch.no_grad()
    def top_probabilities(models: Models, hidden: Tensor, places: Tensor) -> Tensor:
        model = models.trained

        def top_probability(places: Tensor) -> tuple[Tensor]:
            return (model.compute_logits(hidden[places]).float().softmax(dim=-1).amax(dim=-1),)

        return score_in_chunks(top_probability, places, model.config.vocab)[0]

    def teacher_targets(self, models: Models, rows: Rows) -> TargetFunction | None:
        """Return the target distributions of scored rows; None if they are the labels."""
        if not self.needs_teacher:
            return None
        teacher = models.others["teacher"]
        with torch.no_grad():
            hidden = hidden_states(teacher, replace(rows, ranges=document_ranges(rows.ranges)))

        @torch.no_grad()
        def soft_targets(places: Tensor) -> Tensor:
            probabilities = teacher.compute_logits(hidden[places]).float().softmax(dim=-1)
            if not self.hard:
                return probabilities
            true = F.one_hot(rows.labels[places], probabilities.shape[-1]).to(probabilities.dtype)
            return probabilities.lerp(true, self.hard)

        return soft_targets
