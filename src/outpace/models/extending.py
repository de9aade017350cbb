"""EAGLE-3 drafts (Li et al., 2025) and heads that predict several tokens (MTP).

Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from outpace.decoding.target import Kind
from outpace.models.attention import Attend, Attention
from outpace.models.config import ModelConfig
from outpace.models.draft import (
    DFlash2Draft,
    DFlashDraft,
    DFlashFusedDraft,
    Draft,
    DSparkDraft,
    check_draft_pair,
)
from outpace.models.norm import build_norm
from outpace.models.transformer import Block, Context, Transformer


class MTPDraft(Draft):
    """A layer of the target's own kind, on a hidden state and the next token."""

    # The row of slot i receives the hidden state of token i and the token i + 1, and predicts token
    # i + 2. Its own states after the norm are the input of the next step. Embedding and head are
    # the target's.

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        super().__init__(config, target)
        self.fusion = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.embedding_norm, self.state_norm = build_norm(config), build_norm(config)
        self.blocks = nn.ModuleList([Block(config, 0)])
        self.norm = build_norm(config)
        self.initialize_weights()

    def input_rows(self, ids: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the projection of tokens `ids i64[T]` and their concatenated features."""
        parts = self.embedding_norm(self.embed_tokens(ids)), self.state_norm(torch.cat([*features]))
        rows: Tensor = self.fusion(torch.cat(parts, -1))
        return rows


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Return the configuration of a target's head; raise `ValueError` if it has none or several."""
    if not target.mtp_heads:
        raise ValueError(f"{target.architecture} has no head for multi-token prediction (MTP)")
    if target.mtp_heads > 1:
        raise ValueError(
            f"{target.architecture} has {target.mtp_heads} heads for multi-token prediction "
            "(MTP), and only one is supported"
        )
    return replace(
        target,
        kind=Kind.EAGLE,
        layers=1,
        windows=(),
        unrotated=(),
        delta=None,
        dense_layers=0,
        tied=False,
        shift=2,
        mask_id=None,
        eos=(),
        feature_layers=(target.layers - 1,),
    )


class EagleBlock(Block):
    """A layer whose attention reads a token embedding concatenated with a hidden state."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.hidden_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.norm_residual = config.norm_residual
        assert isinstance(self.attention, Attention)
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
        return self.finish_block(x if wanted is None else x[wanted], attended)


class EagleDraft(Draft):
    """One layer that continues from hidden states: fused ones of a target, then its own."""

    # The row of slot i receives the hidden state of token i and the token i + 1, and predicts token
    # i + 2.

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        super().__init__(fit_draft_config(config, target.config), target)
        size, norms = self.config.feature_size, config.norm_features
        self.feature_norm = nn.RMSNorm(size, config.norm_eps) if norms else None
        self.blocks = nn.ModuleList([EagleBlock(config, 0)])
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.make_head()
        self.initialize_weights()

    def fuse_features(self, features: Tensor) -> Tensor:
        """Return rows `[T, dim]` for hidden states `[T, f]` of the target."""
        normed = features if self.feature_norm is None else self.feature_norm(features)
        rows: Tensor = self.fusion(normed)
        return rows

    def fuse_inputs(self, features: Sequence[Tensor]) -> Tensor:
        """Return rows `[T, dim]`: target features are fused, those of the draft unchanged."""
        wide = [part for part in features if part.shape[1] != self.config.dim]
        if not wide:
            return torch.cat([*features])
        fused = iter(self.fuse_features(torch.cat(wide)).split([len(part) for part in wide]))
        return torch.cat(
            [part if part.shape[1] == self.config.dim else next(fused) for part in features]
        )

    def capture_layers(
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
        hidden, (block,) = self.fuse_inputs(features), self.blocks
        cos, sin = self.rotary_angles(positions, hidden.dtype)
        within = None if layers else wanted
        hidden = block(hidden, cos, sin, attend, within, self.embed_tokens(ids))
        captured = {0: hidden} if layers else {}
        if within is None and wanted is not None:
            hidden = hidden[wanted]
        return self.norm(hidden), captured


def default_feature_layers(depth: int) -> tuple[int, ...]:
    """Return the layers whose outputs a draft reads by default: inputs of 2, n // 2 and n - 3."""
    if depth < 7:
        raise ValueError(
            f"eagle_config in config.json must list eagle_aux_hidden_state_layer_ids for a target "
            f"of {depth} layers: the three default layers require at least 7"
        )
    return 1, depth // 2 - 1, depth - 4


def fit_draft_config(draft: ModelConfig, target: ModelConfig) -> ModelConfig:
    """Complete the configuration of a draft for a target; raise `ValueError` on a mismatch."""
    if draft.kind is Kind.EAGLE and not draft.feature_layers:
        draft = replace(draft, feature_layers=default_feature_layers(target.layers))
    check_draft_pair(draft, target)
    return draft


def block_draft_type(config: ModelConfig) -> type[DFlashDraft]:
    if config.convolution is not None:
        return DFlash2Draft
    return DFlashDraft if config.chain is None else DSparkDraft


def build_draft_model(config: ModelConfig, target: Transformer) -> Draft:
    """Create a draft of its kind for a target; raise `ValueError` on a mismatch."""
    kinds: dict[Kind, type[Draft]] = {
        Kind.DFLASH: block_draft_type(config),
        Kind.DFLASH_FUSED: DFlashFusedDraft,
        Kind.EAGLE: MTPDraft if config.is_head else EagleDraft,
    }
    return kinds[config.kind](config, target)
