"""Drafts that read their target's hidden states; those of blocks (DFlash, Chen et al., 2026).

Shapes: T rows, C context rows, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outpace.decoding.processor import NEVER
from outpace.models.config import ModelConfig
from outpace.models.transformer import Block, Embedding, Stack, Transformer


class Draft(Stack):
    """Layers on the fused features of a target, whose embedding and head they may borrow.

    What is borrowed is neither trained nor saved here. A head of its own is one over the
    `draft_vocab` tokens that `d2t` names; `t2d` says which tokens these are. Raises `ValueError`
    where draft and target do not fit together.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        check_pair(config, target.config)
        super().__init__()
        self.config = config
        self.lender = (target,)  # in a tuple, so that its weights do not become the draft's
        own = config.own_embedding
        self.embedding = Embedding(config.vocab, config.dim) if own else None
        self.fusion = nn.Linear(config.feature_size, config.dim, bias=False)
        self.unembedding: nn.Linear | None = None

    def make_head(self) -> None:
        """Make a head of its own, where it has one, and the tables of its vocabulary."""
        config = self.config
        if not config.draft_vocab:
            return
        self.unembedding = nn.Linear(config.dim, config.draft_vocab, bias=False)
        if config.draft_vocab < config.vocab:
            known = torch.arange(config.vocab) < config.draft_vocab
            self.register_buffer("d2t", torch.zeros(config.draft_vocab, dtype=torch.int64))
            self.register_buffer("t2d", known)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows `[T, dim]` of tokens `ids i64[T]`, never scaled."""
        embedding = self.lender[0].embedding if self.embedding is None else self.embedding
        rows: Tensor = embedding(ids)
        return rows

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`; never of what it may not say."""
        if self.unembedding is None:
            return self.lender[0].head(hidden)
        logits: Tensor = self.unembedding(hidden).float()
        if (says := self.says) is None:
            return logits
        every = logits.new_full((*logits.shape[:-1], self.config.vocab), NEVER)
        return every.index_copy_(-1, says, logits)

    @property
    def says(self) -> Tensor | None:
        """Tokens `i64[D]` that it may say, in the order of its head; None where these are all."""
        if self.config.draft_vocab in (0, self.config.vocab):
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def check_tables(self) -> None:
        """Raise `ValueError` unless its tables name as many tokens as it may say, and the same."""
        if (says := self.says) is None:
            return
        vocab, wanted = self.config.vocab, self.config.draft_vocab
        if bool(((says < 0) | (says >= vocab)).any()):
            raise ValueError(f"d2t names tokens outside the vocabulary of {vocab}")
        known: Tensor = torch.zeros_like(self.t2d).index_fill_(0, says, True)
        if int(known.sum()) != wanted:
            raise ValueError(f"d2t names {int(known.sum())} tokens, but draft_vocab_size {wanted}")
        if not torch.equal(known, self.t2d):
            raise ValueError("t2d names other tokens than d2t: the tables are not of one draft")


class BlockDraft(Draft):
    """Layers that fill blocks.

    A row stands for its own slot: a block is the last known token and masks, and the row of a mask
    predicts the token that belongs there.
    """

    def stack(self) -> None:
        """Make the layers, behind what takes the features in."""
        config = self.config
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.make_head()
        self.initialise()


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
