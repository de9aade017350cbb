"""DFlash 2 drafts: convolutions over the rows of a block, and a selector of candidates.

After the authors' code in vLLM and SGLang (Inco AI, 2026). Shapes: T rows, R rows whose tokens are
wanted, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from outpace.decoding.processor import BANNED_LOGIT
from outpace.models.attention import Attend
from outpace.models.config import ModelConfig
from outpace.models.draft import ChainedDraft
from outpace.models.transformer import Block


@runtime_checkable
class BlockPlaces(Protocol):
    """Where the blocks of a pass begin, given by the caller."""

    @property
    def offsets(self) -> Tensor:
        """Place of each row in its block, `i64[T]`."""
        ...


class GroupedConvolution(nn.Module):
    """Convolution over the rows of a block, before and after attention or MLP.

    A channel c of row i becomes the sum over taps t of `(base[t, c] + delta[i, t, g]) x[i - t, c]`.
    The group g of the channel has one delta, a projection of the row before attention or MLP. Rows
    before the block count as zero.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.convolution is not None
        self.taps, self.group = config.convolution.taps, config.convolution.group
        kernel = torch.eye(self.taps)[:1, :, None].expand(2, self.taps, config.dim)
        self.base = nn.Parameter(kernel.clone())
        deltas = 2 * self.taps * config.dim // self.group
        self.projection = nn.Linear(config.dim, deltas, bias=False)

    def forward(self, x: Tensor, offsets: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Run attention or MLP between the two convolutions of rows `x [T, dim]`."""
        deltas = self.projection(x).view(len(x), 2, self.taps, -1)
        before, after = (self.base + deltas.repeat_interleave(self.group, -1)).unbind(1)
        return self.mix_rows(after, layer(self.mix_rows(before, x, offsets)), offsets)

    def mix_rows(self, kernels: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
        """Return rows `x [T, dim]` mixed by kernels `[T, taps, dim]` with those before them."""
        mixed = kernels[:, 0] * x
        for tap in range(1, self.taps):
            earlier = x.roll(tap, 0).where((offsets >= tap)[:, None], 0)
            mixed = mixed + kernels[:, tap] * earlier
        return mixed


class ConvolvedBlock(Block):
    """A layer with convolutions before and after its attention and its MLP."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_convolution = GroupedConvolution(config)
        self.mlp_convolution = GroupedConvolution(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Map rows `x [T, dim]` and return the `wanted` ones; see `Block`."""
        assert self.attention_norm is not None and self.mlp_norm is not None
        assert isinstance(attend, BlockPlaces)

        def attend_rows(y: Tensor) -> Tensor:
            if context is None:
                return cast(Tensor, self.attention(y, cos, sin, attend))
            rows = torch.cat((context, y))
            return cast(Tensor, self.attention(rows, cos, sin, attend, None, len(context)))

        offsets = attend.offsets
        x = x + self.attention_convolution(self.attention_norm(x), offsets, attend_rows)
        x = x + self.mlp_convolution(self.mlp_norm(x), offsets, self.mlp)
        return x if wanted is None else x[wanted]


class DFlash2Draft(ChainedDraft):
    """Layers with convolutions over a block, and a selector of one path through its candidates.

    The candidates of a slot are its most probable tokens. One that follows the token p gets, beside
    its logit, the score `<A[p] * H(h), B[c]>`, of embeddings A, B and the hidden state h of its
    slot. The path starts at the last committed token and takes one candidate after another.
    """

    block_type = ConvolvedBlock

    def build_layers(self) -> None:
        """Create the selector and the layers."""
        config = self.config
        assert config.chain is not None
        self.candidates = config.chain.candidates
        self.previous_embedding = nn.Embedding(config.vocab, config.chain.rank)
        self.candidate_embedding = nn.Embedding(config.vocab, config.chain.rank)
        self.selector = nn.Linear(config.dim, config.chain.rank, bias=False)
        super().build_layers()

    def condition_logits(self, hidden: Tensor, logits: Tensor, previous: Tensor) -> Tensor:
        """Add the scores of candidates after the tokens before, and ban all other tokens."""
        logits = logits.float()
        values, tokens = logits.topk(min(self.candidates, logits.shape[1]))
        edge = self.previous_embedding(previous) * self.selector(hidden)
        scores = torch.einsum("rd,rkd->rk", edge, self.candidate_embedding(tokens)).float()
        return torch.full_like(logits, BANNED_LOGIT).scatter(1, tokens, values + scores)
