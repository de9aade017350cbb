"""WeDLM: mask filling under causal attention, with observed tokens moved before the masks.

The rows of Liu et al., "WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention
for Fast Inference" (2025), sections 4.1 and 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from outpace.decoding.target import CAUSAL_KINDS
from outpace.errors import OptionError
from outpace.field_types import Count, Fraction, NonNegativeInt, TokenId, Weight
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.layer_attention import hidden_states
from outpace.training.objective import Loss, Models, Objective, cross_entropy
from outpace.training.rows import UNSCORED, Bools, Floats, Ints, Rows, join_rows, next_token_rows

StreamWeighting = Literal["normalised", "inverse", "uniform"]
MIN_RATIO = 1e-8  # lower bound of ratios, which are divided by


@dataclass(frozen=True, kw_only=True)
class WeDLM(Objective):
    """Trains on two streams of rows per example: the clean text, and reordered masked text.

    The clean stream is causal and, with `ar_weight`, predicts the next token. The other is
    divided into blocks with a random masked fraction. Unmasked tokens move to the front of their
    block, and every token keeps its position. A row attends to the clean text before its block,
    and causally within its block; a mask predicts the token at its position.
    """

    block: Count | tuple[Count, ...] = 32
    """Length of a block. Each of several lengths adds a masked stream to the clean one: blocks of
    one train the next token, longer ones train to predict ahead."""
    per_block: bool = True
    """Whether the masked fraction is drawn per block or per example."""
    ratios: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Bounds of the masked fraction."""
    weighting: StreamWeighting = "normalised"
    """Weight of a mask: one over its fraction, normalised by the sum of these weights
    (`normalised`, the authors' trainer) or by the number of response tokens (`inverse`, the
    paper's equation 10); or 1 (`uniform`)."""
    ar_weight: Weight = 1.0
    """Weight of the next-token loss relative to that of the masks."""
    ends: NonNegativeInt = 0
    """Additional end tokens after a response, to train that end tokens follow the end."""
    aligned: bool = True
    """Whether blocks start at the first token, or at a random offset as in a sliding window."""
    causal: bool = True
    """Whether a row of the masked stream attends to its block up to itself, or to all of it, the
    ablation in Figure 5c of the paper."""
    end_weight: Weight = 1.0
    """Weight of the additional end tokens."""
    mark_weight: Weight = 1.0
    """Weight of marked tokens (see `Data.mark`)."""
    mask_id: TokenId | None = None
    """The mask token; set by the model."""
    length: Count | None = None
    """Maximum positions of the model; set by it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.block_lengths:
            raise OptionError("block", self.block, "must be a length of at least 1, or several")
        low, high = self.ratios
        if not 0 <= low <= high <= 1:
            raise OptionError("ratios", self.ratios, "must be two fractions in ascending order")

    @property
    def block_lengths(self) -> tuple[int, ...]:
        return (self.block,) if isinstance(self.block, int) else self.block

    def bind(self, config: ModelConfig) -> Self:
        """Set mask token and length; `ValueError` unless the model is causal and has a mask."""
        mask_id = config.mask_id if self.mask_id is None else self.mask_id
        if mask_id is None or config.kind not in CAUSAL_KINDS:
            lacks = "has no mask token" if mask_id is None else "is not causal"
            raise ValueError(
                f"wedlm needs a causal model with a mask token, and {config.architecture} {lacks}; "
                "adapt it to such a family, or set mask_id"
            )
        return replace(self, mask_id=mask_id, length=config.max_length)

    def rows(self, example: Example, rng: Generator) -> Rows:
        assert self.length is not None, "bind the objective first"
        prompt, length = len(example.prompt), len(example)
        ends = max(min(self.ends, self.length - length), 0) if example.ended else 0
        tokens = np.array([*example.prompt, *example.response, *example.response[-1:] * ends])
        weights = np.repeat([0.0, 1.0, self.end_weight], [prompt, length - prompt, ends])
        weights[prompt:length][example.marks] = self.mark_weight
        parts = [next_token_rows(tokens, weights)]
        parts[0].normaliser = 0.0
        for size in self.block_lengths:
            first = size if self.aligned else int(rng.integers(1, size + 1))
            blocks = (np.arange(len(tokens)) + size - first) // size
            masked, ratios = self.draw_masks(blocks, prompt, rng)
            parts.append(
                self.masked_stream(tokens, weights, blocks, masked, ratios, sum(map(len, parts)))
            )
        return join_rows(parts)

    def draw_masks(self, blocks: Ints, prompt: int, rng: Generator) -> tuple[Bools, Floats]:
        """Draw which tokens are masked; also return the masked fraction of each token's block.

        `blocks i64[L]` is the block of each token; the first `prompt` tokens are never masked.
        The masked fraction of a block is exact up to rounding to whole tokens.
        """
        low, high = self.ratios
        drawn = low + (high - low) * rng.random(blocks[-1] + 1 if self.per_block else 1)
        ratios = np.broadcast_to(np.maximum(drawn, MIN_RATIO), blocks[-1] + 1)
        masked = np.zeros(len(blocks), dtype=bool)
        for block in range(blocks[prompt], blocks[-1] + 1):
            places = prompt + np.flatnonzero(blocks[prompt:] == block)
            count = round(len(places) * float(ratios[block]))
            masked[rng.choice(places, count, replace=False)] = True
        return masked, ratios[blocks]

    def masked_stream(
        self,
        tokens: Ints,
        token_weights: Floats,
        blocks: Ints,
        masked: Bools,
        ratios: Floats,
        begin: int,
    ) -> Rows:
        """Build the masked stream from row `begin` on: per block observed tokens, then masks."""
        # Blocks without a mask are omitted, since no scored row attends to them.
        assert self.mask_id is not None, "bind the objective first"
        order = np.lexsort((masked, blocks))
        order = order[np.isin(blocks, blocks[masked])[order]]
        own, holes = blocks[order], masked[order]
        ranges = np.zeros((len(order), 2, 2), dtype=np.int32)
        ranges[:, 0, 1] = np.searchsorted(blocks, own)
        ranges[:, 1, 0] = begin + np.searchsorted(own, own)
        places = np.arange(len(order)) if self.causal else np.searchsorted(own, own, "right") - 1
        ranges[:, 1, 1] = begin + places + 1
        scale = 1.0 if self.weighting == "uniform" else 1 / (ratios[order] + MIN_RATIO)
        return Rows(
            ids=torch.from_numpy(np.where(holes, self.mask_id, tokens[order])),
            positions=torch.from_numpy(order),
            ranges=torch.from_numpy(ranges),
            labels=torch.from_numpy(np.where(holes, tokens[order], UNSCORED)),
            weights=torch.from_numpy(
                np.where(holes, scale * token_weights[order], 0.0).astype(np.float32)
            ),
            normaliser=float(token_weights.sum()),
        )

    def loss(self, models: Models, rows: Rows) -> Loss:
        """Compute the normalised losses of masks and of next tokens, and their weighted mean."""
        hidden = hidden_states(models.trained, rows)
        # Only rows of masked streams have a second range.
        streamed = (rows.ranges[:, 1, 1] > rows.ranges[:, 1, 0]).to(hidden.device)
        masks, weight = self.part_loss(models, hidden, rows, streamed)
        over = rows.normaliser if self.weighting == "inverse" else weight
        mean = masks.total / over
        metrics = {"accuracy": masks.metrics["accuracy"], "masks": (masks.total.detach(), weight)}
        if self.ar_weight:
            text, weight = self.part_loss(models, hidden, rows, ~streamed)
            mean = (mean + self.ar_weight * text.total / weight) / (1 + self.ar_weight)
            metrics["next"] = text.total.detach(), weight
        return Loss(mean * rows.normaliser, metrics)

    @staticmethod
    def part_loss(models: Models, hidden: Tensor, rows: Rows, part: Tensor) -> tuple[Loss, Tensor]:
        labels = rows.labels.where(part, UNSCORED)
        weight = rows.weights[part].sum().clamp(min=MIN_RATIO)
        return cross_entropy(models.trained, hidden, replace(rows, labels=labels)), weight
