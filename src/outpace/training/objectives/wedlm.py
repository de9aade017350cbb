"""WeDLM: masks are filled under causal attention, because what is known is moved in front of them.

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
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.kinds import Count, Share, TokenId, Weight, Whole, check_bounds
from outpace.training.objective import Loss, Models, Objective, cross_entropy
from outpace.training.rows import UNSCORED, Bools, Floats, Ints, Rows, join, next_tokens
from outpace.training.sights import hidden_states

Weighting = Literal["normalised", "inverse", "uniform"]
LEAST = 1e-8  # what a ratio is kept above


@dataclass(frozen=True, kw_only=True)
class WeDLM(Objective):
    """Two streams of rows per example: the clean text, and the text with masks, reordered.

    The clean stream is causal and, with `ar_weight`, learns the next token. The other is cut into
    blocks, of each of which a random share is masked. What is not masked moves to the front of its
    block, and every token keeps its position. A row sees the clean text before its block, and its
    block up to itself; a mask is scored on the token of its own position.

    Attributes:
        block: length of a block. Several lengths make a masked stream each beside one clean one: in
            blocks of one a mask learns what the row before it predicts, in long ones to go ahead.
        per_block: whether each block draws a share of masks, or the example one for all.
        ratios: bounds of that share.
        weighting: what a mask counts: one over its share, divided by the sum of these weights
            (`normalised`, the authors' trainer) or by the number of response tokens (`inverse`,
            the paper's equation 10); or all alike (`uniform`).
        ar_weight: weight of the next-token loss against that of the masks.
        ends: further end tokens behind a response, so that slots behind an end are known to be.
        aligned: whether blocks begin with the example, or anywhere, as a window does that slides.
        end_weight: weight of the further end tokens.
        mark_weight: weight of marked tokens (see `Data.mark`).
        mask_id: the token of a mask; taken from the model.
        length: positions that the model knows; taken from it.
    """

    block: Count | tuple[Count, ...] = 32
    per_block: bool = True
    ratios: tuple[Share, Share] = (0.0, 1.0)
    weighting: Weighting = "normalised"
    ar_weight: Weight = 1.0
    ends: Whole = 0
    aligned: bool = True
    end_weight: Weight = 1.0
    mark_weight: Weight = 1.0
    mask_id: TokenId | None = None
    length: Count | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.blocks:
            raise ValueError("block is a length from 1 on, or several, not ()")
        low, high = self.ratios
        if not 0 <= low <= high <= 1:
            raise ValueError(f"ratios are a lower and an upper share of masks, not {self.ratios}")
        if self.weighting not in ("normalised", "inverse", "uniform"):
            raise ValueError(
                f"weighting must be normalised, inverse or uniform, not {self.weighting!r}"
            )

    @property
    def blocks(self) -> tuple[int, ...]:
        """Length of the blocks of each masked stream."""
        return (self.block,) if isinstance(self.block, int) else self.block

    def bind(self, config: ModelConfig) -> Self:
        """Take the mask from the model; refuse one without, or one that is not causal."""
        mask_id = config.mask_id if self.mask_id is None else self.mask_id
        if mask_id is None or config.kind not in CAUSAL_KINDS:
            lacks = "has no mask token" if mask_id is None else "is not causal"
            raise ValueError(
                f"{config.architecture} {lacks}; adapt it to a causal family that has a mask, or "
                "set mask_id"
            )
        return replace(self, mask_id=mask_id, length=config.max_length)

    def rows(self, example: Example, rng: Generator) -> Rows:
        """The clean stream and the masked ones, with masks drawn anew."""
        assert self.length is not None, "bind the objective first"
        given, known = len(example.prompt), len(example.prompt) + len(example.response)
        ends = max(min(self.ends, self.length - known), 0) if example.ended else 0
        tokens = np.array([*example.prompt, *example.response, *example.response[-1:] * ends])
        worth = np.repeat([0.0, 1.0, self.end_weight], [given, known - given, ends])
        worth[given:known][example.marks] = self.mark_weight
        parts = [replace(next_tokens(tokens, worth), mass=0.0)]
        for size in self.blocks:
            first = size if self.aligned else int(rng.integers(1, size + 1))
            blocks = (np.arange(len(tokens)) + size - first) // size
            masked, ratios = self.masks(blocks, given, rng)
            parts.append(self.stream(tokens, worth, blocks, masked, ratios, sum(map(len, parts))))
        return join(parts)

    def masks(self, blocks: Ints, given: int, rng: Generator) -> tuple[Bools, Floats]:
        """Which tokens are masked, and the share that the block of each has drawn.

        `blocks i64[L]` says which block a token lies in; the first `given` are never masked. Of
        the others a block masks its share exactly, but for rounding to whole tokens.
        """
        low, high = self.ratios
        drawn = low + (high - low) * rng.random(blocks[-1] + 1 if self.per_block else 1)
        ratios = np.broadcast_to(np.maximum(drawn, LEAST), blocks[-1] + 1)
        masked = np.zeros(len(blocks), dtype=bool)
        for block in range(blocks[given], blocks[-1] + 1):
            places = given + np.flatnonzero(blocks[given:] == block)
            count = round(len(places) * float(ratios[block]))
            masked[rng.choice(places, count, replace=False)] = True
        return masked, ratios[blocks]

    def stream(
        self,
        tokens: Ints,
        worth: Floats,
        blocks: Ints,
        masked: Bools,
        ratios: Floats,
        begin: int,
    ) -> Rows:
        """The text with masks, block by block: what is known first, then the masks.

        Blocks without a mask are left out, since nothing sees them. `begin` rows lie before these.
        """
        assert self.mask_id is not None, "bind the objective first"
        order = np.lexsort((masked, blocks))
        order = order[np.isin(blocks, blocks[masked])[order]]
        own, holes = blocks[order], masked[order]
        ranges = np.zeros((len(order), 2, 2), dtype=np.int32)
        ranges[:, 0, 1] = np.searchsorted(blocks, own)
        ranges[:, 1, 0] = begin + np.searchsorted(own, own)
        ranges[:, 1, 1] = begin + np.arange(len(order)) + 1
        scale = 1.0 if self.weighting == "uniform" else 1 / (ratios[order] + LEAST)
        return Rows(
            ids=torch.from_numpy(np.where(holes, self.mask_id, tokens[order])),
            positions=torch.from_numpy(order),
            ranges=torch.from_numpy(ranges),
            labels=torch.from_numpy(np.where(holes, tokens[order], UNSCORED)),
            weights=torch.from_numpy(np.where(holes, scale * worth[order], 0.0).astype(np.float32)),
            mass=float(worth.sum()),
        )

    def loss(self, models: Models, rows: Rows) -> Loss:
        """The losses of masks and of next tokens, each over its weights, and their mean."""
        hidden = hidden_states(models.trained, rows)
        # Only the rows of a masked stream have a second range.
        streamed = (rows.ranges[:, 1, 1] > rows.ranges[:, 1, 0]).to(hidden.device)
        masks, weight = self.part_loss(models, hidden, rows, streamed)
        over = rows.mass if self.weighting == "inverse" else weight
        mean = masks.total / over
        metrics = {"accuracy": masks.metrics["accuracy"], "masks": (masks.total.detach(), weight)}
        if self.ar_weight:
            text, weight = self.part_loss(models, hidden, rows, ~streamed)
            mean = (mean + self.ar_weight * text.total / weight) / (1 + self.ar_weight)
            metrics["next"] = text.total.detach(), weight
        return Loss(mean * rows.mass, metrics)

    @staticmethod
    def part_loss(models: Models, hidden: Tensor, rows: Rows, part: Tensor) -> tuple[Loss, Tensor]:
        """Loss of some of the rows, and the sum of their weights."""
        labels = rows.labels.where(part, UNSCORED)
        weight = rows.weights[part].sum().clamp(min=LEAST)
        return cross_entropy(models.trained, hidden, replace(rows, labels=labels)), weight
