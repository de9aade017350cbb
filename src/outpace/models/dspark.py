"""DSpark drafts: a DFlash draft with a Markov head and a confidence head (DeepSeek-AI, 2026).

Shapes: R rows of different blocks, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outpace.models.draft import ChainedDraft


class DSparkDraft(ChainedDraft):
    """Layers that predict a block in one pass, whose tokens are then chosen one after another.

    The Markov head adds a bias to the logits of a token that depends on the token before it. The
    confidence head predicts whether the target will accept the token, before it is chosen.
    """

    def build_layers(self) -> None:
        """Create the heads and the layers."""
        config = self.config
        assert config.chain is not None
        rank, self.reads_previous = config.chain.rank, config.chain.reads_previous
        self.previous_embedding = nn.Embedding(config.vocab, rank) if rank else None
        self.transition = nn.Linear(rank, config.vocab, bias=False) if rank else None
        self.acceptance: nn.Linear | None = None
        if config.chain.predicts_acceptance:
            self.acceptance = nn.Linear(config.dim + rank * self.reads_previous, 1)
            nn.init.zeros_(self.acceptance.bias)
        super().build_layers()

    def embed_previous(self, previous: Tensor) -> Tensor:
        """Return the embeddings `[R, rank]` of tokens `previous i64[R]`."""
        assert self.previous_embedding is not None
        rows: Tensor = self.previous_embedding(previous)
        return rows

    def condition_logits(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Add the bias of the tokens before, where there is a Markov head."""
        if self.transition is None:
            return logits
        return logits + self.transition(self.embed_previous(previous))[:, : logits.shape[1]]

    def predict_acceptance(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Apply the confidence head."""
        return self.acceptance_logits(hidden, previous).sigmoid()

    def acceptance_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Return the logits `f32[R]` of the probability that the target accepts the next token.

        Args:
            hidden: hidden states of the rows that predict it, `[R, dim]`.
            previous: tokens before it, `i64[R]`.
        """
        assert self.acceptance is not None
        if self.reads_previous:
            hidden = torch.cat((hidden, self.embed_previous(previous)), -1)
        logits: Tensor = self.acceptance(hidden)
        return logits.squeeze(-1).float()
