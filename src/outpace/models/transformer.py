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


class Linear(nn.Linear):
    """A linear layer without hooks, whose machinery costs as much as a small product."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows `x [..., in]`."""
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang and Sennrich, 2019), statistics in float32."""

    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Norm rows `x [..., dim]`."""
        if x.device.type != "cpu" or torch.is_grad_enabled():
            return self.forward(x)
        # PyTorch has no fused kernel for the CPU; on few rows this takes half its time.
        if x.dtype == torch.float32:
            dim = x.shape[-1]
            size = torch.linalg.vector_norm(x, 2, -1, True)
            size.hypot_(constant((self.eps * dim) ** 0.5))
            return torch.addcdiv(constant(0.0), x * self.weight, size, value=dim**0.5)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        square = torch.addcmul(constant(self.eps), size, size, value=1 / x.shape[-1])
        return (x * square.rsqrt_()).to(x.dtype) * self.weight


@cache
def constant(value: float) -> Tensor:
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
        self.qkv = Linear(config.dim, rows, bias=config.qkv_bias)
        self.out = Linear(width, config.dim, bias=config.out_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        behind: int = 0,
    ) -> Tensor:
        """Attend with rows `x [T, dim]`; the `wanted` ones come back.

        The first `behind` rows are only seen, and do not count among the others.
        """
        qkv = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, -1)
        qk, v = qkv.split_with_sizes((self.heads + self.kv_heads, self.kv_heads), 1)
        if self.qk_norm:
            q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1)
        q, k = rotate(qk, cos, sin).to(x.dtype).split_with_sizes((self.heads, self.kv_heads), 1)
        attended = attend(self.layer, q[behind:] if behind else q, k, v).flatten(1)
        return self.out(attended if wanted is None else attended[wanted])


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020) with gate and up projection in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.mlp, bias=config.mlp_bias)
        self.down = Linear(config.mlp, config.dim, bias=config.mlp_bias)

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
        wanted: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Map rows `x [T, dim]`; the `wanted` ones come back.

        Rows `context [C, dim]`, which stand before them, are only seen.
        """
        y, behind = self.attention_norm(x), 0
        if context is not None:
            y, behind = torch.cat((context, y)), context.shape[0]
        # Straight to `forward`: the calls of a module cost as much as those of a small product.
        attended = self.attention.forward(y, cos, sin, attend, wanted, behind)
        x = attended + (x if wanted is None else x[wanted])
        return x + self.mlp.forward(self.mlp_norm(x))


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
        dtype = torch.float32 if self.config.rope.float32 else dtype
        return (
            self.cos.index_select(0, positions).to(dtype).unsqueeze(1),
            self.sin.index_select(0, positions).to(dtype).unsqueeze(1),
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
        self.unembedding: nn.Module | None = None
        if not config.tied:
            self.unembedding = Linear(config.dim, config.vocab, bias=False)
        self.initialise()

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm, `[T, dim]`, of rows `ids i64[T]`.

        With `wanted i64[R]` those of these rows only, `[R, dim]`: the last block computes nothing
        but the keys of the others.
        """
        hidden, _ = self.capture(ids, positions, attend, (), wanted)
        return hidden

    def capture(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        layers: Container[int],
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The same, and the hidden states `[T, dim]` that some layers put out.

        Those of the last layer are taken after the final norm, as published drafts count them.
        """
        x = self.embedding(ids)
        cos, sin = self.angles(positions, x.dtype)
        captured: dict[int, Tensor] = {}
        *blocks, last = self.blocks
        for layer, block in enumerate(blocks):
            x = block(x, cos, sin, attend)
            if layer in layers:
                captured[layer] = x
        if len(blocks) not in layers:
            return self.norm(last(x, cos, sin, attend, wanted)), captured
        captured[len(blocks)] = x = self.norm(last(x, cos, sin, attend))
        return (x if wanted is None else x[wanted]), captured

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`."""
        if self.unembedding is None:
            return F.linear(hidden, self.embedding.weight)
        return self.unembedding(hidden)
