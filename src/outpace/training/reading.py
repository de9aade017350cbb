"""What a draft learns from of its target: hidden states of some layers, of rows of plain text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.models.config import ModelConfig
from outpace.models.transformer import Transformer
from outpace.training.sights import over_rows


@dataclass(frozen=True)
class Reading:
    """Which hidden states of a target a loss reads.

    Attributes:
        layers: that put out what the draft sees.
        last: whether those after the final norm are wanted too, which give distributions.
    """

    layers: tuple[int, ...]
    last: bool

    def width(self, target: ModelConfig) -> int:
        """Numbers of one row."""
        return (len(self.layers) + self.last) * target.dim

    @torch.no_grad()
    def states(
        self,
        target: Transformer,
        ids: Tensor,
        positions: Tensor,
        ranges: Tensor,
        stored: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States of `layers` side by side, `[C, layers · dim]`, and the last ones, `[C, dim]`.

        They are computed for C rows, or are those `stored`, as `joined` has them. Without `last`
        nothing may be read of the second.
        """
        if stored is not None:
            inner = len(self.layers) * target.config.dim
            return stored[:, :inner], stored[:, inner:]
        attend = over_rows(target.config, ranges, ids.device)
        last, captured = target.capture(ids, positions, attend, self.layers)
        return torch.cat([captured[layer] for layer in self.layers], -1), last

    def joined(self, target: Transformer, ids: Tensor, positions: Tensor, ranges: Tensor) -> Tensor:
        """All that is read of C rows, as it is stored, `[C, width]`."""
        features, last = self.states(target, ids, positions, ranges)
        return torch.cat((features, last), -1) if self.last else features
