"""Heads for multi-token prediction, as drafts of the model that they are published with.

"DeepSeek-V3 Technical Report" (DeepSeek-AI, 2024), section 2.2. The order of the input and the
state that is read differ between families, see `checkpoints/families/mtp.py`.

Shapes: T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from outpace.decoding.target import Kind
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.norm import build_norm
from outpace.models.transformer import BEFORE_NORM, Block, Transformer


class MTPDraft(Draft):
    """A layer of the target's own kind, on a hidden state and the next token.

    The row of slot i receives the hidden state of token i and the token i + 1, and predicts token i
    + 2. Its own states after the norm are the input of the next step. Embedding and head are the
    target's.
    """

    def __init__(self, config: ModelConfig, target: Transformer) -> None:
        super().__init__(config, target)
        assert config.mtp is not None
        self.states_first = config.mtp.states_first
        self.fusion = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.embedding_norm, self.state_norm = build_norm(config), build_norm(config)
        self.blocks = nn.ModuleList([Block(config, 0)])
        self.norm = build_norm(config)
        self.initialize_weights()

    def input_rows(self, ids: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the projection of tokens `ids i64[T]` and their concatenated features."""
        parts = self.embedding_norm(self.embed_tokens(ids)), self.state_norm(torch.cat([*features]))
        rows: Tensor = self.fusion(torch.cat(parts[::-1] if self.states_first else parts, -1))
        return rows


def mtp_config(target: ModelConfig) -> ModelConfig:
    """Return the configuration of a target's head; raise `ValueError` if it has none or several."""
    if (head := target.mtp) is None:
        raise ValueError(f"{target.architecture} has no head for multi-token prediction (MTP)")
    if head.count > 1:
        raise ValueError(
            f"{target.architecture} has {head.count} heads for multi-token prediction (MTP), and "
            "only one is supported"
        )
    return replace(
        target,
        kind=Kind.EAGLE,
        layers=1,
        sights=(),
        unrotated=(),
        delta=None,
        dense_layers=0,
        tied=False,
        shift=2,
        mask_id=None,
        eos=(),
        feature_layers=(BEFORE_NORM if head.before_norm else target.layers - 1,),
    )
