"""The EAGLE draft, which extends hidden states of its target by its own (EAGLE-3, Li et al., 2025).

Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from outpace.decoding.target import Kind
from outpace.models.config import ModelConfig
from outpace.models.draft import AddingDraft, Draft, FeatureDraft, check_pair
from outpace.models.transformer import Attend, Block, Context, Transformer


class WideBlock(Block):
    """A layer whose attention reads a token embedding concatenated with a hidden state."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.hidden_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.norm_residual = config.norm_residual
        rows = self.attention.qkv.out_features
        self.attention.qkv = nn.Linear(2 * config.dim, rows, bias=config.qkv_bias)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Map hidden states `x [T, dim]`, given embeddings `context [T, dim]` of the same rows."""
        assert context is not None and self.attention_norm is not None
        normed = self.hidden_norm(x)
        y = torch.cat((self.attention_norm(context), normed), -1)
        attended: Tensor = self.attention(y, cos, sin, attend, wanted)
        x = normed if self.norm_residual else x
        return self.rest(x if wanted is None else x[wanted], attended)


class ExtendingDraft(Draft):
    """One layer that continues from hidden states: fused ones of a target, then its own.

    The row of slot i receives the hidden state of token i and the token i + 1, and predicts token i
    + 2.
    """

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        super().__init__(fitted(config, target.config), target)
        size, norms = self.config.feature_size, config.norm_features
        self.feature_norm = nn.RMSNorm(size, config.norm_eps) if norms else None
        self.blocks = nn.ModuleList([WideBlock(config, 0)])
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.make_head()
        self.initialise()

    def fuse(self, features: Tensor) -> Tensor:
        """Return rows `[T, dim]` for hidden states `[T, f]` of the target."""
        normed = features if self.feature_norm is None else self.feature_norm(features)
        rows: Tensor = self.fusion(normed)
        return rows

    def taken_in(self, features: Sequence[Tensor]) -> Tensor:
        """Return rows `[T, dim]`: target features are fused, those of the draft unchanged."""
        wide = [part for part in features if part.shape[1] != self.config.dim]
        if not wide:
            return torch.cat([*features])
        fused = iter(self.fuse(torch.cat(wide)).split([len(part) for part in wide]))
        return torch.cat(
            [part if part.shape[1] == self.config.dim else next(fused) for part in features]
        )

    def capture(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        layers: Collection[int] = (),
        wanted: Tensor | None = None,
        context: Context | None = None,
        features: Sequence[Tensor] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Return hidden states after the norm, of all or the `wanted` rows, and those before it.

        The concatenated `features` belong to the rows. The states before the norm, captured as
        layer 0, are the input of the next step.
        """
        hidden, (block,) = self.taken_in(features), self.blocks
        cos, sin = self.angles(positions, hidden.dtype)
        within = None if layers else wanted
        hidden = block(hidden, cos, sin, attend, within, self.embed(ids))
        captured = {0: hidden} if layers else {}
        if within is None and wanted is not None:
            hidden = hidden[wanted]
        return self.norm(hidden), captured


def usual_layers(depth: int) -> tuple[int, ...]:
    """Return the layers whose outputs a draft reads by default: inputs of 2, n // 2 and n - 3."""
    if depth < 7:
        raise ValueError(
            f"eagle_config in config.json must list eagle_aux_hidden_state_layer_ids for a target "
            f"of {depth} layers: the three default layers require at least 7"
        )
    return 1, depth // 2 - 1, depth - 4


def fitted(draft: ModelConfig, target: ModelConfig) -> ModelConfig:
    """Complete the configuration of a draft for a target; raise `ValueError` on a mismatch."""
    if draft.kind is Kind.EXTENDING and not draft.feature_layers:
        draft = replace(draft, feature_layers=usual_layers(target.layers))
    check_pair(draft, target)
    return draft


def draft_of(config: ModelConfig, target: Transformer) -> Draft:
    """Create a draft of its kind for a target; raise `ValueError` on a mismatch."""
    kinds: dict[Kind, type[Draft]] = {
        Kind.DRAFT: FeatureDraft,
        Kind.ADDING: AddingDraft,
        Kind.EXTENDING: ExtendingDraft,
    }
    return kinds[config.kind](config, target)
