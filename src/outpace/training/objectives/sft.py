"""Supervised fine-tuning: every row sees what came before and scores the next token."""

from dataclasses import dataclass
from typing import Self

import torch
from numpy.random import Generator

from outpace.attention.ranges import causal
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.objective import Objective
from outpace.training.rows import UNSCORED, Rows


@dataclass(frozen=True, kw_only=True)
class SFT(Objective):
    """Next-token prediction.

    Attributes:
        prompt_weight: Weight of prompt tokens in the loss; 0 scores the response only.
        mark_weight: Weight of marked response tokens (see `Data.mark`).
    """

    prompt_weight: float = 0.0
    mark_weight: float = 1.0

    def bind(self, config: ModelConfig) -> Self:
        """Refuse a model whose rows score their own slot: a causal row would see its answer."""
        if config.shift != 1:
            raise ValueError(
                f"{config.architecture} scores a slot on its own row, which sft cannot train; "
                "use mdlm"
            )
        return self

    def rows(self, example: Example, rng: Generator) -> Rows:
        """One causal row a token."""
        ids = [*example.prompt, *example.response]
        weights = [
            *[self.prompt_weight] * len(example.prompt),
            *[self.mark_weight if mark else 1.0 for mark in example.marks],
        ]
        targets = [token if w else UNSCORED for token, w in zip(ids, weights, strict=True)]
        return Rows(
            ids=torch.tensor(ids),
            positions=torch.arange(len(ids)),
            ranges=causal(len(ids)),
            labels=torch.tensor([*targets[1:], UNSCORED]),
            weights=torch.tensor([*weights[1:], 0.0]),
            mass=float(sum(weights[1:])),
        )
