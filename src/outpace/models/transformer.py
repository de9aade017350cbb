"""The one decoder that every family is: RMSNorm, rotary, grouped attention, gated MLP.

Shapes: T rows (tokens fed in one pass, of any number of sequences), H heads, K key/value heads,
D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.config import ModelConfig
from outpace.models.experts import Experts
from outpace.models.rope import rotate, tables


class Attend(Protocol):
    """Attention over whatever memory the caller keeps."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store `k, v` for this layer and attend with `q [T, H, D]`: `[T, H, D]`.

        `k, v` are `[T, K, D]`, or `[C + T, K, D]` where a draft has C rows of context that are
        only seen; those come first.
        """
        ...


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
        self.wide, self.rotates = config.wide_qk_norm, layer not in config.unrotated
        if config.qk_norm:
            sizes = (self.heads, self.kv_heads) if self.wide else (1, 1)
            self.q_norm, self.k_norm = (
                nn.RMSNorm(size * config.head_dim, config.norm_eps) for size in sizes
            )

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
            if self.wide:
                q, k = q.flatten(1), k.flatten(1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1).view_as(qk)
        if self.rotates:
            qk = rotate(qk, cos, sin).to(x.dtype)
        q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
        attended = attend(self.layer, q[behind:] if behind else q, k, v).flatten(1)
        out: Tensor = self.out(attended if wanted is None else attended[wanted])
        return out


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020) with gate and up projection in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.mlp, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        gate, up = self.gate_up(x).chunk(2, -1)
        mapped: Tensor = self.down(F.silu(gate) * up)
        return mapped


class Block(nn.Module):
    """One layer: attention and MLP, each normed before (or after) and added after."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = Experts(config, MLP) if config.experts else MLP(config)
        self.after = config.norms_after

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
        y, behind = x if self.after else self.attention_norm(x), 0
        if context is not None:
            y, behind = torch.cat((context, y)), context.shape[0]
        attended: Tensor = self.attention(y, cos, sin, attend, wanted, behind)
        x = x if wanted is None else x[wanted]
        if self.after:
            x = x + self.attention_norm(attended)
            after: Tensor = self.mlp_norm(self.mlp(x))
            return x + after
        x = attended + x
        mapped: Tensor = self.mlp(self.mlp_norm(x))
        return x + mapped


Context = tuple[Tensor, Tensor]
"""Features `[C, f]` that a draft reads, and their positions `i64[C]`."""


class Stack(nn.Module, ABC):
    """Layers, a final norm and rotary tables: what every model here is made of.

    It knows neither cache nor mask nor method; `attend` brings them.
    """

    config: ModelConfig
    blocks: nn.ModuleList
    norm: nn.RMSNorm
    cos: Tensor
    sin: Tensor

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Rows `[T, dim]` of tokens `ids i64[T]`."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`."""

    def fuse(self, features: Tensor) -> Tensor:
        """Rows `[C, dim]` of the features `[C, f]` that a draft reads; other models have none."""
        raise NotImplementedError

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, `[T, dim]`, or of the `wanted` rows, `[R, dim]`."""
        return self.capture(ids, positions, attend, (), wanted, context)[0]

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
        """Hidden states after the final norm, `[T, dim]`, of rows `ids i64[T]`; those of `layers`.

        With `wanted i64[R]` those of these rows only, `[R, dim]`: the last block computes nothing
        but the keys of the others. The hidden states `[T, dim]` that some layers put out come by
        layer; those of the last one are taken after the final norm, as published drafts count them.
        A `context` becomes keys and values only, which `attend` gets before those of the rows: it
        is called with `q [T, H, D]` and `k, v [C + T, K, D]`. Only drafts take in `features`.
        """
        x, behind = self.embed(ids), None
        if context is not None:
            behind, positions = self.fuse(context[0]), torch.cat((context[1], positions))
        cos, sin = self.angles(positions, x.dtype)
        captured: dict[int, Tensor] = {}
        *blocks, last = self.blocks
        for layer, block in enumerate(blocks):
            x = block(x, cos, sin, attend, context=behind)
            if layer in layers:
                captured[layer] = x
        if len(blocks) not in layers:
            return self.norm(last(x, cos, sin, attend, wanted, behind)), captured
        captured[len(blocks)] = x = self.norm(last(x, cos, sin, attend, context=behind))
        return (x if wanted is None else x[wanted]), captured

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


class Embedding(nn.Embedding):
    """Rows of tokens, and the head of a model whose head is tied to it."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`."""
        return F.linear(hidden, self.weight)


class Transformer(Stack):
    """A decoder of any family: ids and positions in, hidden states out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.unembedding: nn.Module | None = None
        if not config.tied:
            self.unembedding = nn.Linear(config.dim, config.vocab, bias=False)
        self.initialise()

    def embed(self, ids: Tensor) -> Tensor:
        """Rows `[T, dim]` of tokens `ids i64[T]`."""
        rows: Tensor = self.embedding(ids)
        return rows

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states `[..., dim]`."""
        if self.unembedding is None:
            return self.embedding.head(hidden)
        logits: Tensor = self.unembedding(hidden)
        return logits
