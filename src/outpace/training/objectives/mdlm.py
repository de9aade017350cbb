"""Masked diffusion: bidirectional attention, with loss on masked tokens.

The default is the objective of MDLM (Sahoo et al., 2024) as in the fine-tuning of LLaDA (Nie et
al., 2025) and Dream (Ye et al., 2025). The options add other kinds of rows, which a small model
needs to retain the arithmetic of the causal model that it was adapted from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np
import torch
from numpy.random import Generator

from outpace.attention.ranges import full_ranges
from outpace.field_types import (
    Bounds,
    Count,
    Fraction,
    OpenFraction,
    PositiveFloat,
    TokenId,
    Weight,
)
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.objective import Objective
from outpace.training.objectives.sft import SFT
from outpace.training.rows import (
    UNSCORED,
    Bools,
    Floats,
    Ints,
    Response,
    Rows,
    check_canvas,
    join_rows,
    masked_rows,
    pad_response,
)

MIN_MASKS = 2
"""Minimum masks of a short or anchored suffix."""


@dataclass(frozen=True, kw_only=True)
class MDLM(Objective):
    """Masked diffusion over the response.

    An example becomes one of four kinds of rows:

    - Uniform, the remaining fraction: every token is masked with the same random probability t
      and has weight 1/t.
    - Suffix: all tokens from some slot on are masked, as in left-to-right decoding.
    - Anchored: several short suffixes share one clean copy of the example and attend to its
      tokens before their start. This gives several times as many predictions per row, though
      clean tokens do not attend to masks.
    - Causal: next-token rows.
    """

    canvas: tuple[Count, Count] | None = None
    """Minimum and maximum length to which the response is padded with end tokens, drawn per
    example; by default it is not padded."""
    least: OpenFraction = 1e-3
    """Minimum masked fraction of uniform rows."""
    suffix: Fraction = 0.0
    """Fraction of examples with suffix rows."""
    anchored: Fraction = 0.0
    """Fraction of examples with anchored rows."""
    causal: Fraction = 0.0
    """Fraction of examples with causal rows."""
    starts: Fraction = 0.0
    """Fraction of suffixes that start on a marked token (see `Data.mark`)."""
    short: Fraction = 0.5
    """Fraction of suffixes with a random small number of masks instead of all up to the end of the
    canvas, as with a limited lookahead."""
    anchors: Count = 6
    """Suffixes per anchored example."""
    longest: Count = 16
    """Maximum masks of an anchored suffix."""
    scored: Fraction = 0.0
    """Fraction of anchored examples whose clean copy is causal and scored."""
    peak: Weight = 2.5
    """Weight of the first masked token of a suffix in excess of `floor`."""
    floor: Weight = 0.15
    """Weight of masked tokens far from the start of a suffix."""
    decay: PositiveFloat = 4.0
    """Decay constant in slots of the excess weight."""
    suffix_weight: Weight = 1.0
    """Weight of suffix rows."""
    end_weight: Weight = 1.0
    """Weight of padding end tokens."""
    mark_weight: Weight = 1.0
    """Weight of marked tokens."""
    shift: Annotated[int, Bounds(0, 1)] | None = None
    """1 if row p - 1 predicts slot p, 0 if row p does; set by the model."""
    mask_id: TokenId | None = None
    """The mask token; set by the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suffix + self.anchored + self.causal > 1:
            raise ValueError(
                "the sum of suffix, anchored and causal must be at most 1, got "
                f"{self.suffix} + {self.anchored} + {self.causal}"
            )
        check_canvas(self.canvas)

    def bind(self, config: ModelConfig) -> Self:
        """Set shift and mask token; `ValueError` if the model has no mask token."""
        mask_id = config.mask_id if self.mask_id is None else self.mask_id
        if mask_id is None:
            raise ValueError(
                f"mdlm needs a mask token, and {config.architecture} has none; adapt it to a family"
                " that has one, or set mask_id"
            )
        if (self.causal or self.scored) and config.shift != 1:
            raise ValueError("causal and scored need a model of shift 1; set both to 0")
        return replace(self, shift=config.shift, mask_id=mask_id)

    def rows(self, example: Example, rng: Generator) -> Rows:
        kind = rng.random()
        if kind < self.causal:
            return self.causal_rows(example, rng)
        answer = pad_response(
            example, self.canvas, rng, mark_weight=self.mark_weight, end_weight=self.end_weight
        )
        if kind < self.causal + self.suffix:
            return self.suffix_rows(example, answer, rng)
        if kind < self.causal + self.suffix + self.anchored:
            return self.anchored_rows(example, answer, rng)
        # Slot 0 has no row before it, so a shifted model cannot predict it.
        first = self.shift if not example.prompt else 0
        share = self.least + (1 - self.least) * rng.random()
        masked = rng.random(len(answer)) < share
        masked[:first] = False
        weights = np.where(masked, answer.token_weights / share, 0.0)
        normaliser = float(answer.token_weights[first:].sum())
        return self.mutual_rows(example.prompt, answer.tokens, masked, weights, normaliser)

    def causal_rows(self, example: Example, rng: Generator) -> Rows:
        return SFT(mark_weight=self.mark_weight).rows(example, rng)

    def suffix_starts(self, example: Example, count: int, rng: Generator) -> list[int]:
        first = self.shift if not example.prompt and len(example.response) > 1 else 0
        anywhere = range(first or 0, len(example.response))
        marked = [place for place in anywhere if example.marks[place]] or anywhere
        chosen = {
            int(rng.choice(marked if rng.random() < self.starts else anywhere))
            for _ in range(count)
        }
        return sorted(chosen)

    def suffix_rows(self, example: Example, answer: Response, rng: Generator) -> Rows:
        """Mask all tokens from a random slot on, with weights that decay from there."""
        (start,) = self.suffix_starts(example, 1, rng)
        masks = len(answer) - start
        if rng.random() < self.short:
            masks = self.sample_mask_count(masks, rng)
        end = start + masks
        weights = np.zeros(end)
        weights[start:] = (
            self.suffix_weight * answer.token_weights[start:end] * self.position_weights(masks)
        )
        masked, normaliser = np.arange(end) >= start, float(weights.sum())
        return self.mutual_rows(example.prompt, answer.tokens[:end], masked, weights, normaliser)

    def anchored_rows(self, example: Example, answer: Response, rng: Generator) -> Rows:
        """Build a clean copy, followed by short suffixes that attend to it and to themselves."""
        # The clean copy is divided at the suffixes' starts, and no row attends past its division,
        # so that keys visible to a suffix do not leak its masked tokens.
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
            clean.normaliser = 0.0
        parts = [clean]
        tokens = np.array([*example.prompt, *answer.tokens])
        for start in starts:
            masks = self.sample_mask_count(min(self.longest, len(answer) - start), rng)
            weights = answer.token_weights[start : start + masks] * self.position_weights(masks)
            slots = np.arange(start - self.shift, start + masks) + prompt
            masked = slots >= prompt + start
            block = self.with_holes(tokens[slots], masked, np.pad(weights, (self.shift, 0)))
            block.positions = torch.from_numpy(slots)
            block.ranges[:, 0] = torch.tensor([0, slots[0]])
            block.ranges[:, 1] = torch.tensor([total, total + len(slots)])
            parts.append(block)
            total += len(slots)
        return join_rows(parts)

    def sample_mask_count(self, most: int, rng: Generator) -> int:
        least = min(MIN_MASKS, most)
        return int(least * (most / least) ** rng.random())

    def position_weights(self, masks: int) -> Floats:
        return self.floor + self.peak * np.exp(-np.arange(masks) / self.decay)

    def mutual_rows(
        self, prompt: Sequence[int], canvas: Ints, masked: Bools, weights: Floats, normaliser: float
    ) -> Rows:
        padding = (len(prompt), 0)
        tokens = np.array([*prompt, *canvas])
        rows = self.with_holes(tokens, np.pad(masked, padding), np.pad(weights, padding))
        rows.normaliser = normaliser
        return rows

    def with_holes(self, tokens: Ints, masked: Bools, weights: Floats) -> Rows:
        assert self.shift is not None and self.mask_id is not None, "bind the objective first"
        ranges = full_ranges(len(tokens))
        return masked_rows(tokens, masked, weights, ranges, shift=self.shift, mask_id=self.mask_id)
