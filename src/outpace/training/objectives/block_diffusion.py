"""Block diffusion: predicts the masks of each block, given the clean text of earlier blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.random import Generator

from outpace.decoding.target import Kind
from outpace.field_types import Bounds, Count, OpenFraction, TokenId, Weight
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.objective import Objective
from outpace.training.rows import UNSCORED, Bools, Floats, Ints, Rows, join_rows, pad_response

BlockWeighting = Literal["inverse", "uniform"]


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Objective):
    """Trains on a clean stream of rows, and one or two masked ones that attend to its blocks.

    Block diffusion as in BD3-LM (Arriola et al., 2025, section 4), SDAR (Cheng et al., 2025) and
    Fast-dLLM v2 (Wu et al., 2025). Blocks are counted from the first token of the prompt, as in
    decoding. In each block every response token is masked with the same random probability t.
    """

    method: ClassVar[str | None] = "block_diffusion"

    block: Count | None = None
    """Tokens per block; the model's by default."""
    least: OpenFraction = 1e-3
    """Minimum of t."""
    weighting: BlockWeighting = "inverse"
    """Weight of a mask: 1/t (`inverse`), or 1 (`uniform`)."""
    complement: bool = False
    """Whether a second stream masks the complementary tokens, so that each token is predicted once;
    needs `uniform` (Fast-dLLM v2)."""
    ahead: Weight = 1.0
    """Weight of the last row of each block in the clean stream. In a model of shift 1 it predicts
    the first token of the next block, as in decoding; the authors of Fast-dLLM v2 train this in
    the masked streams only."""
    end_weight: Weight = 1.0
    """Weight of the padding end tokens after a response, up to the end of its block."""
    mark_weight: Weight = 1.0
    """Weight of marked tokens (see `Data.mark`)."""
    shift: Annotated[int, Bounds(0, 1)] | None = None
    """1 if row p - 1 predicts slot p, 0 if row p does; set by the model."""
    mask_id: TokenId | None = None
    """The mask token; set by the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.complement and self.weighting != "uniform":
            raise ValueError(f"complement needs weighting uniform, got {self.weighting!r}")

    def bind(self, config: ModelConfig) -> Self:
        """Set block, shift and mask token; `ValueError` unless it is a block diffusion model."""
        if config.kind is not Kind.BLOCK:
            raise ValueError(
                f"block_diffusion needs a block diffusion model, and {config.architecture} is not "
                "one; adapt it to such a family in [model.config]"
            )
        block = self.block or config.block
        if block is None:
            raise ValueError(
                "block must be set, because the model's configuration has no block size"
            )
        return replace(self, block=block, shift=config.shift, mask_id=config.mask_id)

    def rows(self, example: Example, rng: Generator) -> Rows:
        assert self.block is not None, "bind the objective first"
        prompt, end = len(example.prompt), -(-len(example) // self.block) * self.block
        answer = pad_response(
            example,
            (end - prompt, end - prompt),
            rng,
            mark_weight=self.mark_weight,
            end_weight=self.end_weight,
        )
        tokens = np.append(np.array(example.prompt, dtype=np.int64), answer.tokens)
        token_weights = np.append(np.zeros(prompt), answer.token_weights)
        shares = self.least + (1 - self.least) * rng.random(-(-len(tokens) // self.block))
        share = shares[np.arange(len(tokens)) // self.block]
        masked = rng.random(len(tokens)) < share
        parts = [self.clean_rows(tokens, token_weights)]
        for mask in (masked, ~masked)[: 1 + self.complement]:
            weights = token_weights / share if self.weighting == "inverse" else token_weights
            parts.append(self.masked_stream(tokens, weights, mask, sum(map(len, parts))))
        rows = join_rows(parts)
        once = self.weighting == "inverse" or self.complement
        rows.normaliser += float(token_weights.sum()) * (1 if once else (1 + self.least) / 2)
        return rows

    def clean_rows(self, tokens: Ints, token_weights: Floats) -> Rows:
        """Build the unmasked stream; the last row of a block may predict the next token."""
        assert self.block is not None, "bind the objective first"
        slots = np.arange(len(tokens))
        ranges = np.zeros((len(tokens), 2, 2), dtype=np.int32)
        ranges[:, 0, 1] = np.minimum((slots // self.block + 1) * self.block, len(tokens))
        next_weights = np.append(token_weights[1:], 0.0) * (self.ahead if self.shift else 0.0)
        weights = np.where((slots + 1) % self.block == 0, next_weights, 0.0)
        return Rows(
            ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(slots),
            ranges=torch.from_numpy(ranges),
            labels=torch.from_numpy(np.where(weights > 0, np.append(tokens[1:], 0), UNSCORED)),
            weights=torch.from_numpy(weights.astype(np.float32)),
            normaliser=float(weights.sum()),
        )

    def masked_stream(self, tokens: Ints, weights: Floats, masked: Bools, begin: int) -> Rows:
        """Build a stream with masks for masked tokens of positive weight, from row `begin` on."""
        # Blocks without a mask are omitted, since no scored row attends to them.
        assert self.block is not None and self.shift is not None and self.mask_id is not None
        masked, blocks = masked & (weights > 0), np.arange(len(tokens)) // self.block
        order = np.flatnonzero(np.isin(blocks, blocks[masked]))
        own = blocks[order]
        ranges = np.zeros((len(order), 2, 2), dtype=np.int32)
        ranges[:, 0, 1] = own * self.block
        ranges[:, 1, 0] = begin + np.searchsorted(own, own)
        ranges[:, 1, 1] = begin + np.searchsorted(own, own, side="right")
        predicted = order + self.shift
        labels = np.append(np.where(masked, tokens, UNSCORED), UNSCORED)[predicted]
        return Rows(
            ids=torch.from_numpy(np.where(masked, self.mask_id, tokens)[order]),
            positions=torch.from_numpy(order),
            ranges=torch.from_numpy(ranges),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(np.append(weights, 0.0)[predicted].astype(np.float32)),
            normaliser=0.0,
        )
