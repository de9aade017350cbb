"""Supervised fine-tuning: causal next-token prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.random import Generator

from outpace.field_types import Weight
from outpace.models.config import ModelConfig
from outpace.training.data import Example
from outpace.training.objective import Objective
from outpace.training.rows import Rows, next_token_rows


@dataclass(frozen=True, kw_only=True)
class SFT(Objective):
    """Next-token prediction on responses and, optionally, prompts."""

    prompt_weight: Weight = 0.0
    """Weight of prompt tokens in the loss; 0 uses the response only."""
    mark_weight: Weight = 1.0
    """Weight of marked response tokens (see `Data.mark`)."""

    def bind(self, config: ModelConfig) -> Self:
        """Raise `ValueError` unless the shift is 1; otherwise a row's input would be its label."""
        if config.shift != 1:
            raise ValueError(
                f"sft needs a model of shift 1, and {config.architecture} has shift "
                f"{config.shift}; use mdlm"
            )
        return self

    def rows(self, example: Example, rng: Generator) -> Rows:
        responses = np.where(example.marks, self.mark_weight, 1.0)
        prompts = np.full(len(example.prompt), self.prompt_weight)
        tokens = np.array([*example.prompt, *example.response])
        return next_token_rows(tokens, np.append(prompts, responses))
