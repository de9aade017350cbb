"""The decoder of all families: RMSNorm, rotary embedding, grouped attention and gated MLP.

Shapes: T rows (tokens of one pass, of any number of sequences), H heads, K key/value heads, D head
size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.activation import GATED_ACTIVATIONS
from outpace.models.config import ModelConfig
from outpace.models.experts import build_feed_forward
from outpace.models.gated_delta import GatedDelta
from outpace.models.norm import build_norm
from outpace.models.rope import rotary_tables, rotary_width, rotate_heads


class Attend(Protocol):
    """Attention over memory managed by the caller."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Store `k, v` of this layer and attend with `q`.

        Args:
            layer: index of the layer.
            q: queries, `[T, H, D]`.
            k: keys `[T, K, D]`, or `[C + T, K, D]` if a draft has C context rows, which come
                first.
            v: values, shaped like the keys.
            sinks: additional score per head, `[H]`, in each row's softmax, without a value.

        Returns:
            `[T, H, D]`.
        """
        ...


class Attention(nn.Module):
    """Projections of one layer; `attend` determines which slots a row sees."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = config.attention_layers.index(layer)
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.has_gate, width = config.output_gate, config.heads * config.head_dim
        rows = width * (2 if self.has_gate else 1) + 2 * config.kv_heads * config.head_dim
        self.qkv = nn.Linear(config.dim, rows, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.dim, bias=config.out_bias)
        self.head_dim, self.qk_norm = config.head_dim, config.qk_norm
        self.wide_qk_norm, self.has_rotary = config.wide_qk_norm, layer not in config.unrotated
        if config.qk_norm:
            sizes = (self.heads, self.kv_heads) if self.wide_qk_norm else (1, 1)
            self.q_norm, self.k_norm = (
                build_norm(config, size * config.head_dim) for size in sizes
            )
        self.own_columns, self.query_factor = config.rotary_columns(layer), config.query_factor
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context_rows: int = 0,
    ) -> Tensor:
        """Attend with rows `x [T, dim]` and return the `wanted` ones.

        The first `context_rows` rows are keys only and do not count among the others.
        """
        q, k, v = self.project_qkv(x, cos, sin)
        if context_rows:
            q = q[context_rows:]
        attended = self.attend_queries(attend, q, k, v)
        out: Tensor = self.out(attended if wanted is None else attended[wanted])
        return out

    def project_qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[T, H, D]`, keys and values `[T, K, D]` of rows `x [T, dim]`.

        Queries with an output gate are `[T, H, 2 D]`, as `attend_queries` takes them.
        """
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv.split_with_sizes((qkv.shape[1] - self.kv_heads, self.kv_heads), 1)
        if self.has_gate:  # a query and a gate per head, then keys
            gate = qk[:, 1 : 2 * self.heads : 2]
            qk = torch.cat((qk[:, : 2 * self.heads : 2], qk[:, 2 * self.heads :]), 1)
        if self.qk_norm:
            q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
            if self.wide_qk_norm:
                q, k = q.flatten(1), k.flatten(1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), 1).view_as(qk)
        if self.own_columns is not None:
            cos, sin = cos[..., self.own_columns], sin[..., self.own_columns]
        if self.has_rotary:
            qk = rotate_heads(qk, cos, sin).to(x.dtype)
        q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
        if self.query_factor != 1:
            q = q * self.query_factor
        return torch.cat((q, gate), -1) if self.has_gate else q, k, v

    def attend_queries(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries `[T, H, D]` and return `[T, H * D]`, with the gate of a query."""
        optional = () if self.sinks is None else (self.sinks,)
        if not self.has_gate:
            return attend(self.layer, q, k, v, *optional).flatten(1)
        q, gate = q.chunk(2, -1)
        return (attend(self.layer, q.contiguous(), k, v, *optional) * gate.sigmoid()).flatten(1)


class MLP(nn.Module):
    """A gated MLP (Shazeer, 2020) with gate and up projection in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.mlp, bias=config.mlp_bias)
        self.down = nn.Linear(config.mlp, config.dim, bias=config.mlp_bias)
        self.activate = GATED_ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        gate, up = self.activate(self.gate_up(x))
        mapped: Tensor = self.down(gate * up)
        return mapped


class Block(nn.Module):
    """One layer: attention and MLP with residual connections, normalised before, after or both.

    In a gated delta layer, `attention` is the mixer that takes its place.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        before, after = config.norms != "after", config.norms != "before"
        self.attention_norm = build_norm(config) if before else None
        self.attention: Attention | GatedDelta = (
            Attention(config, layer)
            if layer in config.attention_layers
            else GatedDelta(config, layer)
        )
        self.attention_after = build_norm(config) if after else None
        self.mlp_norm = build_norm(config) if before else None
        self.mlp = build_feed_forward(config, layer, MLP)
        self.mlp_after = build_norm(config) if after else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Map rows `x [T, dim]` and return the `wanted` ones.

        Rows `context [C, dim]`, which come first, are keys only.
        """
        y, context_rows = (
            self.attention_input(x, context),
            0 if context is None else context.shape[0],
        )
        attended: Tensor = self.attention(y, cos, sin, attend, wanted, context_rows)
        return self.finish_block(x if wanted is None else x[wanted], attended)

    def attention_input(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Return the context unchanged, followed by the normalised rows."""
        y = x if self.attention_norm is None else self.attention_norm(x)
        return y if context is None else torch.cat((context, y))

    def finish_block(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention and MLP to rows `x [T, dim]`."""
        if self.attention_after is not None:
            attended = self.attention_after(attended)
        x = attended + x
        mapped: Tensor = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        return x + (mapped if self.mlp_after is None else self.mlp_after(mapped))


BEFORE_NORM = -1
"""Number that stands for the output of the last layer before the final norm."""

Context = tuple[Tensor, Tensor]
"""Features `[C, f]` that a draft reads, and their positions `i64[C]`."""


class Stack(nn.Module, ABC):
    """Layers, a final norm and rotary tables: the common part of all models.

    It has no cache, mask or method; `attend` provides them.
    """

    config: ModelConfig
    blocks: nn.ModuleList
    norm: nn.RMSNorm
    cos: Tensor
    sin: Tensor

    @abstractmethod
    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Return embeddings `[T, dim]` of tokens `ids i64[T]`."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., vocab]` of hidden states `[..., dim]`."""

    def fuse_features(self, features: Tensor) -> Tensor:
        """Return rows `[C, dim]` for the features `[C, f]` that a draft reads; drafts only."""
        raise NotImplementedError

    def input_rows(self, ids: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the input of the first layer, `[T, dim]`, for tokens `ids i64[T]`."""
        return self.embed_tokens(ids)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm: `[T, dim]`, or `[R, dim]` if `wanted`."""
        return self.capture_layers(ids, positions, attend, (), wanted, context)[0]

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
        """Return hidden states of rows `ids i64[T]` after the final norm, and those of `layers`.

        Args:
            ids: tokens, `i64[T]`.
            positions: rotary positions, `i64[T]`.
            attend: attention; it receives the keys of the context before those of the rows, as
                `q [T, H, D]` and `k, v [C + T, K, D]`.
            layers: layers whose outputs to return.
            wanted: rows to return, `i64[R]`; the last block computes only keys and values of
                the others.
            context: features of a draft that become keys and values only, with their positions.
            features: features that a draft takes with its rows.

        Returns:
            Hidden states `[T, dim]`, or `[R, dim]` of the `wanted` rows, and states `[T, dim]`
            by layer. Those of the last layer are taken after the final norm, as published
            drafts count them.
        """
        x, fused = self.input_rows(ids, features), None
        if context is not None:
            fused, positions = self.fuse_features(context[0]), torch.cat((context[1], positions))
        cos, sin = self.rotary_angles(positions, x.dtype)
        captured: dict[int, Tensor] = {}
        *blocks, last = self.blocks
        for layer, block in enumerate(blocks):
            x = block(x, cos, sin, attend, context=fused)
            if layer in layers:
                captured[layer] = x
        if not {len(blocks), BEFORE_NORM} & {*layers}:
            return self.norm(last(x, cos, sin, attend, wanted, fused)), captured
        captured[BEFORE_NORM] = last(x, cos, sin, attend, context=fused)
        captured[len(blocks)] = x = self.norm(captured[BEFORE_NORM])
        return (x if wanted is None else x[wanted]), captured

    def initialize_weights(self) -> None:
        """Initialise the matrices and create the rotary tables, once all parts exist."""
        for matrix in (p for p in self.parameters() if p.dim() == 2 and not p.is_meta):
            nn.init.normal_(matrix, std=0.02)
        for name, table in zip(("cos", "sin"), self.build_rotary_tables(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def build_rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Return rotary tables for all supported positions, those of all ropes concatenated."""
        size, length = self.config.head_dim, self.config.max_length
        if torch.get_default_device().type == "meta":
            # To compute on the meta device, PyTorch loads its compiler, which takes two seconds.
            shape = length, sum(rotary_width(rope, size) for rope in self.config.ropes)
            return torch.empty(shape), torch.empty(shape)
        cos, sin = zip(
            *(rotary_tables(rope, size, length) for rope in self.config.ropes), strict=True
        )
        return torch.cat(cos, -1), torch.cat(sin, -1)

    def rotary_angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine `[T, 1, D]` at `positions i64[T]`, all ropes concatenated."""
        dtype = torch.float32 if self.config.rope.float32 else dtype
        return (
            self.cos.index_select(0, positions).to(dtype).unsqueeze(1),
            self.sin.index_select(0, positions).to(dtype).unsqueeze(1),
        )


class Embedding(nn.Embedding):
    """Token embeddings, and the head of a model whose head is tied to them."""

    def reset_parameters(self) -> None:
        """Initialise the rows, except on the meta device, where PyTorch would load its compiler."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., vocab]` of hidden states `[..., dim]`."""
        return F.linear(hidden, self.weight)


class Transformer(Stack):
    """A decoder of any family: ids and positions in, hidden states out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = build_norm(config)
        self.unembedding: nn.Module | None = None
        if not config.tied:
            self.unembedding = nn.Linear(config.dim, config.vocab, bias=False)
        self.initialize_weights()

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Return embeddings `[T, dim]` of tokens `ids i64[T]`."""
        rows: Tensor = self.embedding(ids)
        scale = self.config.embedding_scale
        # The scale is rounded to the dtype first, as in the authors' code.
        return rows if scale == 1 else rows * torch.tensor(scale, dtype=rows.dtype)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., vocab]` of hidden states `[..., dim]`."""
        if self.unembedding is None:
            return self.embedding.compute_logits(hidden)
        logits: Tensor = self.unembedding(hidden)
        return logits
