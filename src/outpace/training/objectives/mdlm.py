"""Masked diffusion: all rows see one another, masked ones are scored.

By default the objective of MDLM (Sahoo et al., 2024) as LLaDA (Nie et al., 2025) and Dream (Ye et
al., 2025) fine-tune with it. The options add rows that a small model needs in order to keep the
arithmetic of the causal model that it was adapted from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np
import torch
from numpy.random import Generator

from outpace.attention.ranges import full
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.kinds import (
    Bounds,
    Count,
    Part,
    Positive,
    Share,
    TokenId,
    Weight,
    check_bounds,
)
from outpace.training.noise import Response, check_canvas, holes, padded
from outpace.training.objective import Objective
from outpace.training.objectives.sft import SFT
from outpace.training.rows import UNSCORED, Bools, Floats, Ints, Rows, join


@dataclass(frozen=True, kw_only=True)
class MDLM(Objective):
    """Masked diffusion over the response.

    An example becomes one of four kinds of rows. *Uniform*, what `suffix`, `anchored` and `causal`
    leave: every token is masked with one random probability t and weighs 1/t. *Suffix*: all is
    masked from some slot on, which is what decoding from left to right meets. *Anchored*: many
    short suffixes share one clean copy of the example, of which each sees what lies before it;
    several times as many predictions per row, though the clean tokens do not see the masks.
    *Causal*: next-token rows.

    Attributes:
        canvas: smallest and largest length that the response is padded to with end tokens, drawn
            for each example; by default it is not padded.
        least: smallest share of masked tokens in a uniform row.
        suffix: share of examples that become suffix rows.
        anchored: share of examples that become anchored rows.
        causal: share of examples that become causal rows.
        starts: share of suffixes that start on a marked token (see `Data.mark`).
        short: share of suffixes that end after a random few masks instead of at the end of the
            canvas, as a limited lookahead does.
        shortest: fewest masks of a short suffix.
        anchors: suffixes of one anchored example.
        longest: most masks of an anchored suffix.
        scored: share of anchored examples whose clean copy is causal and scored as well.
        peak: weight of the first masked token of a suffix beyond that of one far from it.
        floor: weight of a masked token far from the start of a suffix.
        decay: slots over which that falls to a third.
        suffix_weight: weight of the rows of a suffix that stands alone.
        end_weight: weight of the end tokens that only pad.
        mark_weight: weight of marked tokens.
        shift: 1 where row p - 1 scores slot p, 0 where row p does; taken from the model.
        mask_id: the token of a hole; taken from the model.
    """

    canvas: tuple[Count, Count] | None = None
    least: Part = 1e-3
    suffix: Share = 0.0
    anchored: Share = 0.0
    causal: Share = 0.0
    starts: Share = 0.0
    short: Share = 0.5
    shortest: Count = 2
    anchors: Count = 6
    longest: Count = 16
    scored: Share = 0.0
    peak: Weight = 2.5
    floor: Weight = 0.15
    decay: Positive = 4.0
    suffix_weight: Weight = 1.0
    end_weight: Weight = 1.0
    mark_weight: Weight = 1.0
    shift: Annotated[int, Bounds(0, 1)] | None = None
    mask_id: TokenId | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.suffix + self.anchored + self.causal > 1:
            raise ValueError(
                f"suffix {self.suffix}, anchored {self.anchored} and causal {self.causal} are "
                "shares of the same examples; together they must not exceed 1"
            )
        check_canvas(self.canvas)

    def bind(self, config: ModelConfig) -> Self:
        """Take shift and mask token from the model."""
        mask_id = config.mask_id if self.mask_id is None else self.mask_id
        if mask_id is None:
            raise ValueError(
                f"{config.architecture} has no mask token; adapt it to a family that has one, or "
                "set mask_id"
            )
        if (self.causal or self.scored) and config.shift != 1:
            raise ValueError("causal rows need a model of shift 1; set causal and scored to 0")
        return replace(self, shift=config.shift, mask_id=mask_id)

    def rows(self, example: Example, rng: Generator) -> Rows:
        """One example as rows of one of the four kinds."""
        kind = rng.random()
        if kind < self.causal:
            return self.causal_rows(example, rng)
        answer = padded(
            example,
            self.canvas,
            rng,
            mark_weight=self.mark_weight,
            end_weight=self.end_weight,
        )
        if kind < self.causal + self.suffix:
            return self.suffix_rows(example, answer, rng)
        if kind < self.causal + self.suffix + self.anchored:
            return self.anchored_rows(example, answer, rng)
        # Slot 0 has no row before it, so a shifted model is never asked for it.
        first = self.shift if not example.prompt else 0
        share = self.least + (1 - self.least) * rng.random()
        masked = rng.random(len(answer)) < share
        masked[:first] = False
        weights = np.where(masked, answer.worth / share, 0.0)
        mass = float(answer.worth[first:].sum())
        return self.mutual_rows(example.prompt, answer.tokens, masked, weights, mass)

    def causal_rows(self, example: Example, rng: Generator) -> Rows:
        """Rows that see what came before, and score the next token."""
        return SFT(mark_weight=self.mark_weight).rows(example, rng)

    def suffix_starts(self, example: Example, count: int, rng: Generator) -> list[int]:
        """Response slots at which suffixes start, in order."""
        first = self.shift if not example.prompt and len(example.response) > 1 else 0
        anywhere = range(first or 0, len(example.response))
        marked = [place for place in anywhere if example.marks[place]] or anywhere
        chosen = {
            int(rng.choice(marked if rng.random() < self.starts else anywhere))
            for _ in range(count)
        }
        return sorted(chosen)

    def suffix_rows(self, example: Example, answer: Response, rng: Generator) -> Rows:
        """Mask from one slot on, and weigh what lies near it."""
        (start,) = self.suffix_starts(example, 1, rng)
        masks = len(answer) - start
        if rng.random() < self.short:
            masks = self.few(masks, rng)
        end = start + masks
        weights = np.zeros(end)
        weights[start:] = self.suffix_weight * answer.worth[start:end] * self.near(masks)
        masked, mass = np.arange(end) >= start, float(weights.sum())
        return self.mutual_rows(example.prompt, answer.tokens[:end], masked, weights, mass)

    def anchored_rows(self, example: Example, answer: Response, rng: Generator) -> Rows:
        """A clean copy, and after it short suffixes that see what lies before them, and themselves.

        The clean copy is cut where suffixes start, and no row sees past its cut: keys that a
        suffix sees know nothing of what it must fill.
        """
        assert self.shift is not None and self.mask_id is not None, "bind the objective first"
        clean = self.causal_rows(example, rng)
        prompt, total = len(example.prompt), len(clean)
        starts = self.suffix_starts(example, self.anchors, rng)
        starts = [start for start in starts if start + prompt >= self.shift]
        if rng.random() >= self.scored:
            cuts = np.array([*[prompt + start - self.shift for start in starts], total])
            ends = cuts[np.searchsorted(cuts, np.arange(total), side="right")]
            clean.ranges[:, 0, 1] = torch.from_numpy(ends)
            clean.labels.fill_(UNSCORED)
            clean.weights.zero_()
            clean.mass = 0.0
        parts = [clean]
        tokens = np.array([*example.prompt, *answer.tokens])
        for start in starts:
            masks = self.few(min(self.longest, len(answer) - start), rng)
            weights = answer.worth[start : start + masks] * self.near(masks)
            slots = np.arange(start - self.shift, start + masks) + prompt
            masked = slots >= prompt + start
            block = self.with_holes(tokens[slots], masked, np.pad(weights, (self.shift, 0)))
            block.positions = torch.from_numpy(slots)
            block.ranges[:, 0] = torch.tensor([0, slots[0]])
            block.ranges[:, 1] = torch.tensor([total, total + len(slots)])
            parts.append(block)
            total += len(slots)
        return join(parts)

    def few(self, most: int, rng: Generator) -> int:
        """A number of masks, small ones as likely as large ones."""
        least = min(self.shortest, most)
        return int(least * (most / least) ** rng.random())

    def near(self, masks: int) -> Floats:
        """Weights that fall with the distance from the first mask."""
        return self.floor + self.peak * np.exp(-np.arange(masks) / self.decay)

    def mutual_rows(
        self,
        prompt: Sequence[int],
        canvas: Ints,
        masked: Bools,
        weights: Floats,
        mass: float,
    ) -> Rows:
        """Prompt and canvas with holes, all of which see one another."""
        given = len(prompt)
        tokens = np.array([*prompt, *canvas])
        rows = self.with_holes(tokens, np.pad(masked, (given, 0)), np.pad(weights, (given, 0)))
        rows.mass = mass
        return rows

    def with_holes(self, tokens: Ints, masked: Bools, weights: Floats) -> Rows:
        """Rows that all see one another, some of them holes."""
        assert self.shift is not None and self.mask_id is not None, "bind the objective first"
        seen = full(len(tokens))
        return holes(tokens, masked, weights, seen, shift=self.shift, mask_id=self.mask_id)
