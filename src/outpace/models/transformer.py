"""The one decoder that every family is: RMSNorm, rotary, grouped attention, gated MLP.

Shapes: T rows (tokens fed in one pass, of any number of sequences), H heads, K key/value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.config import ModelConfig
from outpace.models.rope import rotate, tables


class Attend(Protocol):
    """Attention over whatever memory the caller keeps."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store `k, v` for this layer and attend with `q [T, H, D]`: `[T, H, D]`.

        `k, v` are `[T, K, D]`, or `[C + T, K, D]` where a draft has C rows of context that are
        only seen; those come first.
        """
        ...


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang and Sennrich, 2019), statistics in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm rows `x [..., dim]`."""
        if x.device.type != "cpu" or torch.is_grad_enabled():
            return super().forward(x)
        # PyTorch has no fused kernel for the CPU; on few rows this takes half its time.
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        square = torch.addcmul(constant(self.eps), size, size, value=1 / x.shape[-1])
        return (x * square.rsqrt_()).to(x.dtype) * self.weight


@cache
def constant(value: float | None) -> Tensor:
    """A number as a tensor, which is cheaper to add than the number."""
    return torch.tensor([value])


class Attention(nn.Module):
    """Projections of one layer; what a row sees is the business of `attend`."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads = config.heads, config.kv_heads
        width = config.heads * config.head_dim
        rows = width + 2 * config.kv_heads * config.head_dim
        self.qkv = nn.Linear(config.dim, rows, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.dim, bias=config.out_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, behind: int = 0
    ) -> Tensor:
        """Attend with rows `x [T, dim]`, of which the first `behind` are only seen."""
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, -1)
        qk, v = qkv.split_with_sizes((self.heads + self.kv_heads, self.kv_heads), 1)
        if self.qk_norm:
            q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = rotate(qk, cos, sin).split_with_sizes((self.heads, self.kv_heads), 1)
        if behind:
            q = q[behind:]
        return self.out(attend(self.layer, q, k, v).reshape(q.shape[0], -1))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020) with gate and up projection in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.mlp, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and MLP, each normed before and added after."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        context: Tensor | None = None,
    ) -> Tensor:
        """Map rows `x [T, dim]`; rows `context [C, dim]`, before them, are only seen."""
        y = self.attention_norm(x)
        if context is None:
            x = x + self.attention(y, cos, sin, attend)
        else:
            rows = torch.cat((context, y))
            x = x + self.attention(rows, cos, sin, attend, len(context))
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    """Layers, a final norm and rotary tables: what every model here is made of."""

    config: ModelConfig
    blocks: nn.ModuleList
    norm: RMSNorm
    cos: Tensor
    sin: Tensor

    def initialise(self) -> None:
        """Draw the matrices and make the tables, once all parts are there."""
        for matrix in (p for p in self.parameters() if p.dim() == 2):
            nn.init.normal_(matrix, std=0.02)
        for name, table in zip(("cos", "sin"), self.rotary(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def rotary(self) -> tuple[Tensor, Tensor]:
        """Rotary tables for every position that the model was made for."""
        return tables(self.config.rope, self.config.head_dim, self.config.max_length)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[T, 1, D]` of rows at `positions i64[T]`."""
        return (
            self.cos[positions].to(dtype).unsqueeze(1),
            self.sin[positions].to(dtype).unsqueeze(1),
        )


class Transformer(Stack):
    """A decoder of any family: ids and positions in, hidden states out.

    It knows neither cache nor mask nor method; `attend` brings them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tied:
            self.unembedding = nn.Linear(config.dim, config.vocab, bias=False)
        self.initialise()

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, `[T, dim]`, of rows `ids i64[T]`."""
        hidden, _ = self.capture(ids, positions, attend, ())
        return hidden

    def capture(
        self, ids: Tensor, positions: Tensor, attend: Attend, layers: Container[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The same, and the hidden states `[T, dim]` that some layers put out.

        Those of the last layer are taken after the final norm, as published drafts count them.
        """
        x = self.embedding(ids)
        cos, sin = self.angles(positions, x.dtype)
        captured = {}
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, attend)
            if layer in layers:
                captured[layer] = x
        hidden = self.norm(x)
        if len(self.blocks) - 1 in captured:
            captured[len(self.blocks) - 1] = hidden
        return hidden, captured

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`."""
        if self.config.tied:
            return F.linear(hidden, self.embedding.weight)
        return self.unembedding(hidden)
