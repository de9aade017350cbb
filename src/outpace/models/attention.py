"""Attention of one layer: its projections, and what a caller that holds the memory provides.

Shapes: T rows (tokens of one pass, of any number of sequences), H heads, K key/value heads, D head
size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.config import ModelConfig
from outpace.models.norm import build_norm
from outpace.models.rope import rotate_heads, rotate_spread


class Attend(Protocol):
    """Attention over memory managed by the caller."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Store `k, v` of this layer and attend with `q`.

        Args:
            layer: index among the layers with keys and values.
            q: queries, `[T, H, D]`.
            k: keys `[T, K, D]`, or `[C + T, K, D]` if a draft has C context rows, which come
                first. `[T, 0, D]` stores none: the layer shares those of `layer`.
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
        owner, (rope, self.own_columns) = config.kv_layer(layer), config.layer_rope(layer)
        self.layer = config.attention_layers.index(owner)
        config = config.layer_config(layer)
        self.heads, self.kv_heads = config.heads, config.kv_heads if owner == layer else 0
        self.has_gate, width = config.output_gate, config.heads * config.head_dim
        self.keys_as_values, self.value_norm = config.keys_as_values, config.value_norm
        narrow = (1 if self.keys_as_values else 2) * self.kv_heads * config.head_dim
        rows = width * (2 if self.has_gate else 1) + narrow
        self.qkv = nn.Linear(config.dim, rows, bias=config.qkv_bias)
        self.out = nn.Linear(width, config.dim, bias=config.out_bias)
        self.head_dim, self.qk_norm, self.norm_eps = (
            config.head_dim,
            config.qk_norm,
            config.norm_eps,
        )
        self.wide_qk_norm, self.has_rotary = config.wide_qk_norm, layer not in config.unrotated
        if config.qk_norm:
            sizes = (self.heads, self.kv_heads) if self.wide_qk_norm else (1, 1)
            self.q_norm = build_norm(config, sizes[0] * config.head_dim)
            if self.kv_heads:
                self.k_norm = build_norm(config, sizes[1] * config.head_dim)
        self.rotate = rotate_spread if rope.spread else rotate_heads
        self.query_factor = config.query_factor
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

        K is 0 if the layer shares those of another. Queries with an output gate are `[T, H, 2 D]`,
        as `attend_queries` takes them.
        """
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv.split_with_sizes((qkv.shape[1] - self.kv_heads, self.kv_heads), 1)
        if self.keys_as_values:
            qk = qkv
        if self.value_norm:
            v = F.rms_norm(v.float(), (self.head_dim,), None, self.norm_eps).to(x.dtype)
        if self.has_gate:  # a query and a gate per head, then keys
            gate = qk[:, 1 : 2 * self.heads : 2]
            qk = torch.cat((qk[:, : 2 * self.heads : 2], qk[:, 2 * self.heads :]), 1)
        if self.qk_norm:
            q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
            if self.wide_qk_norm:
                q, k = q.flatten(1), k.flatten(1)
            normed = (self.q_norm(q), self.k_norm(k)) if self.kv_heads else (self.q_norm(q),)
            qk = torch.cat(normed, 1).view_as(qk)
        if self.own_columns is not None:
            cos, sin = cos[..., self.own_columns], sin[..., self.own_columns]
        if self.has_rotary:
            qk = self.rotate(qk, cos, sin).to(x.dtype)
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
