"""Drafts that read their target's hidden states; those of blocks (DFlash, Chen et al., 2026).

Shapes: T rows, C context rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outpace.models.config import ModelConfig
from outpace.models.transformer import Block, Stack, Transformer


class Draft(Stack):
    """Layers on the fused features of a target, whose embedding they borrow.

    That is neither trained nor saved here. Raises `ValueError` where draft and target do not fit
    together.
    """

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        check_pair(config, target.config)
        super().__init__()
        self.config = config
        self.lender = (target,)  # in a tuple, so that its weights do not become the draft's
        self.fusion = nn.Linear(config.feature_size, config.dim, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows `[T, dim]` of tokens `ids i64[T]`, by the target's embedding, never scaled."""
        rows: Tensor = self.lender[0].embedding(ids)
        return rows


class BlockDraft(Draft):
    """Layers that fill blocks, with the head of the target.

    A row stands for its own slot: a block is the last known token and masks, and the row of a mask
    predicts the token that belongs there.
    """

    def stack(self) -> None:
        """Make the layers, behind what takes the features in."""
        config = self.config
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.initialise()

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`, by the target's head."""
        return self.lender[0].head(hidden)


class FeatureDraft(BlockDraft):
    """Layers whose keys and values also come from the fused features of a target."""

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        super().__init__(config, target)
        self.fusion_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.stack()

    def fuse(self, features: Tensor) -> Tensor:
        """Rows `[C, dim]` of hidden states `[C, f]` of the target."""
        rows: Tensor = self.fusion_norm(self.fusion(features))
        return rows


class AddingDraft(BlockDraft):
    """Layers that take the features of a target in at their input, and nowhere else.

    The tokens of the text are rows as well, and their features are added to their embeddings. Those
    of a block, which nobody knows, are zeros, and add nothing. Its norm has a name of its own, so
    that the weights of neither draft load as the other's.
    """

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        super().__init__(config, target)
        self.feature_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.stack()

    def fuse(self, features: Tensor) -> Tensor:
        """Rows `[T, dim]` of hidden states `[T, f]` of the target; of zeros they are zeros."""
        rows: Tensor = self.feature_norm(self.fusion(features))
        return rows

    def rows(self, ids: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Embeddings of tokens `ids i64[T]` with their features, one part behind the other."""
        return self.embed(ids) + self.fuse(torch.cat([*features]))


def check_pair(draft: ModelConfig, target: ModelConfig) -> None:
    """Raise `ValueError` naming the two values in which a draft and its target disagree."""
    for what, ours, theirs in (
        ("hidden size", draft.dim, target.dim),
        ("vocabulary", draft.vocab, target.vocab),
        ("depth of the target", draft.target_layers or target.layers, target.layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"the draft was made for another target: its {what} is {ours}, "
                f"the target's is {theirs}"
            )
    if bad := [layer for layer in draft.feature_layers if not 0 <= layer < target.layers]:
        raise ValueError(
            f"the draft reads layer {bad[0]} of its target, which has {target.layers} layers, "
            f"0 to {target.layers - 1}"
        )
