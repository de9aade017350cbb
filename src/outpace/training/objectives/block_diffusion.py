"""Block diffusion: the masks of each block, behind the clean text of those before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.random import Generator

from outpace.decoding.target import Kind
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.kinds import Bounds, Count, Part, TokenId, Weight, check_bounds
from outpace.training.noise import padded
from outpace.training.objective import Objective
from outpace.training.rows import UNSCORED, Bools, Floats, Ints, Rows, join

Weighting = Literal["inverse", "uniform"]


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Objective):
    """A clean stream of rows, and one or two with masks whose blocks see the clean ones before.

    Block diffusion as in BD3-LM (Arriola et al., 2025, section 4), SDAR (Cheng et al., 2025) and
    Fast-dLLM v2 (Wu et al., 2025). Blocks are counted from the first token of the prompt, as in
    decoding. In each block every response token is masked with one random probability t.

    Attributes:
        block: tokens of a block; those of the model by default.
        least: smallest t.
        weighting: what a mask counts: 1/t (`inverse`), or all alike (`uniform`).
        complement: whether a second stream masks what the first does not, so that each token is
            learnt once; for masks that count alike (Fast-dLLM v2).
        ahead: weight of the rows that end a block in the clean stream. In a model of shift 1 they
            predict the first token of the next one, which decoding asks them for; the authors of
            Fast-dLLM v2 leave that to rows of masked streams.
        end_weight: weight of the end tokens behind a response, up to the end of its block.
        mark_weight: weight of marked tokens (see `Data.mark`).
        shift: 1 where row p - 1 scores slot p, 0 where row p does; taken from the model.
        mask_id: the token of a mask; taken from the model.
    """

    method: ClassVar[str | None] = "block_diffusion"

    block: Count | None = None
    least: Part = 1e-3
    weighting: Weighting = "inverse"
    complement: bool = False
    ahead: Weight = 1.0
    end_weight: Weight = 1.0
    mark_weight: Weight = 1.0
    shift: Annotated[int, Bounds(0, 1)] | None = None
    mask_id: TokenId | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.weighting not in ("inverse", "uniform"):
            raise ValueError(f"weighting must be inverse or uniform, not {self.weighting!r}")
        if self.complement and self.weighting != "uniform":
            raise ValueError("complement is for masks that count alike: set weighting to uniform")

    def bind(self, config: ModelConfig) -> Self:
        """Take block, shift and mask from the model, which must be a block diffusion model."""
        if config.kind is not Kind.BLOCK:
            raise ValueError(
                f"block_diffusion trains block diffusion models, which {config.architecture} is "
                "not; adapt it to the family of one in [model.config]"
            )
        block = self.block or config.block
        if block is None:
            raise ValueError("the model does not say how long its blocks are; set block")
        return replace(self, block=block, shift=config.shift, mask_id=config.mask_id)

    def rows(self, example: Example, rng: Generator) -> Rows:
        """The clean stream and the masked ones, with masks drawn anew."""
        assert self.block is not None, "bind the objective first"
        given, end = len(example.prompt), -(-len(example) // self.block) * self.block
        answer = padded(
            example,
            (end - given, end - given),
            rng,
            mark_weight=self.mark_weight,
            end_weight=self.end_weight,
        )
        tokens = np.append(np.array(example.prompt, dtype=np.int64), answer.tokens)
        worth = np.append(np.zeros(given), answer.worth)
        shares = self.least + (1 - self.least) * rng.random(-(-len(tokens) // self.block))
        share = shares[np.arange(len(tokens)) // self.block]
        masked = rng.random(len(tokens)) < share
        parts = [self.clean(tokens, worth)]
        for mask in (masked, ~masked)[: 1 + self.complement]:
            weights = worth / share if self.weighting == "inverse" else worth
            parts.append(self.stream(tokens, weights, mask, sum(map(len, parts))))
        rows = join(parts)
        once = self.weighting == "inverse" or self.complement
        rows.mass += float(worth.sum()) * (1 if once else (1 + self.least) / 2)
        return rows

    def clean(self, tokens: Ints, worth: Floats) -> Rows:
        """The text as it stands; the last row of a block may score what follows it."""
        assert self.block is not None, "bind the objective first"
        slots = np.arange(len(tokens))
        ranges = np.zeros((len(tokens), 2, 2), dtype=np.int32)
        ranges[:, 0, 1] = np.minimum((slots // self.block + 1) * self.block, len(tokens))
        next_worth = np.append(worth[1:], 0.0) * (self.ahead if self.shift else 0.0)
        weights = np.where((slots + 1) % self.block == 0, next_worth, 0.0)
        return Rows(
            ids=torch.from_numpy(tokens),
            positions=torch.from_numpy(slots),
            ranges=torch.from_numpy(ranges),
            labels=torch.from_numpy(np.where(weights > 0, np.append(tokens[1:], 0), UNSCORED)),
            weights=torch.from_numpy(weights.astype(np.float32)),
            mass=float(weights.sum()),
        )

    def stream(self, tokens: Ints, weights: Floats, masked: Bools, begin: int) -> Rows:
        """The text with masks where tokens of weight are masked; `begin` rows lie before it.

        Blocks without a mask are left out, since nothing sees them.
        """
        assert self.block is not None and self.shift is not None and self.mask_id is not None
        masked, blocks = masked & (weights > 0), np.arange(len(tokens)) // self.block
        order = np.flatnonzero(np.isin(blocks, blocks[masked]))
        own = blocks[order]
        ranges = np.zeros((len(order), 2, 2), dtype=np.int32)
        ranges[:, 0, 1] = own * self.block
        ranges[:, 1, 0] = begin + np.searchsorted(own, own)
        ranges[:, 1, 1] = begin + np.searchsorted(own, own, side="right")
        asked = order + self.shift
        labels = np.append(np.where(masked, tokens, UNSCORED), UNSCORED)[asked]
        return Rows(
            ids=torch.from_numpy(np.where(masked, self.mask_id, tokens)[order]),
            positions=torch.from_numpy(order),
            ranges=torch.from_numpy(ranges),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(np.append(weights, 0.0)[asked].astype(np.float32)),
            mass=0.0,
        )
