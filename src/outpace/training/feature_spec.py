"""Feature spec: which hidden states of a target a draft is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.config import ModelConfig
from outpace.models.transformer import Transformer
from outpace.training.layer_attention import plan_row_attention


@dataclass(frozen=True)
class FeatureSpec:
    """The hidden states of a target that a loss reads.

    Attributes:
        layers: layers whose outputs are the draft's features.
        last: whether states after the final norm are included, for the target's distributions.
    """

    layers: tuple[int, ...]
    last: bool

    def feature_width(self, target: ModelConfig) -> int:
        """Return the width of a stored row."""
        return (len(self.layers) + self.last) * target.dim

    @torch.no_grad()
    def read_states(
        self,
        target: Transformer,
        ids: Tensor,
        positions: Tensor,
        ranges: Tensor,
        stored: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the states of C rows, or split those `stored` by `joined_states`.

        Returns:
            States of `layers`, concatenated, `[C, layers · dim]`, and states after the final
            norm, `[C, dim]`; the latter are invalid without `last`.
        """
        if stored is not None:
            inner = len(self.layers) * target.config.dim
            return stored[:, :inner], stored[:, inner:]
        attend = plan_row_attention(target.config, ranges, ids.device)
        last, captured = target.capture_layers(ids, positions, attend, self.layers)
        return torch.cat([captured[layer] for layer in self.layers], -1), last

    def joined_states(
        self, target: Transformer, ids: Tensor, positions: Tensor, ranges: Tensor
    ) -> Tensor:
        """Compute the states of C rows in the stored layout, `[C, width]`."""
        features, last = self.read_states(target, ids, positions, ranges)
        return torch.cat((features, last), -1) if self.last else features
