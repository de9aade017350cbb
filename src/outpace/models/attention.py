"""Attention of one layer: projections, rotary embedding, and what the holder of memory provides.

Shapes: T rows (tokens of one pass, of any number of sequences), H heads, K key/value heads, D head
size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.config import ModelConfig, Rope
from outpace.models.norm import build_norm


def rotary_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Return angles per position of each pair, `f64[head_dim / 2]`, and a factor on cos, sin."""
    inverse = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    scaling = rope.scaling
    if scaling is None:
        return inverse, 1.0
    match scaling["rope_type"]:
        case "linear":
            return inverse / scaling["factor"], 1.0
        case "llama3":
            return scale_llama3(inverse, scaling), 1.0
        case kind:
            assert kind == "yarn", kind
            return scale_yarn(inverse, scaling, rope.theta, head_dim)


def scale_llama3(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Scale as Llama 3.1: stretch long waves, leave short ones, with a ramp between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)
    return unscaled * inverse + (1 - unscaled) * inverse / scaling["factor"]


def scale_yarn(
    inverse: Tensor, scaling: Mapping[str, Any], theta: float, head_dim: int
) -> tuple[Tensor, float]:
    """Scale as YaRN (Peng et al., 2023), with a ramp between unscaled and stretched waves."""
    factor = scaling["factor"]
    length = scaling["original_max_position_embeddings"]

    def pair_index(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_index(scaling["beta_fast"]), pair_index(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    steps = torch.arange(head_dim // 2, dtype=torch.float64)
    stretched = ((steps - first) / max(last - first, 0.001)).clamp(0, 1)
    attention = scaling["attention_factor"] or 0.1 * math.log(factor) + 1.0
    return inverse * (1 - stretched) + inverse / factor * stretched, attention


def rotary_tables(rope: Rope, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine `f32[length, head_dim]`, as `rotate_heads` needs them.

    Tables of a rope that rotates only part of a head have only that width.
    """
    inverse, factor = rotary_frequencies(
        rope, head_dim if rope.spread else int(head_dim * rope.share)
    )
    inverse = inverse[: rope.width(head_dim) // 2]
    # Angles are rounded to float32 before the cosine, as published checkpoints were trained.
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse.float()
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `x [T, heads, head_dim]` by tables of their positions `[T, 1, head_dim]`.

    Dimensions beyond the width of the tables are unchanged.
    """
    if (size := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate_heads(x[..., :size], cos, sin), x[..., size:]), -1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rotate_spread(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first pairs of heads `x [T, heads, head_dim]`, as many as the tables have."""
    # The two dimensions of a pair are half a head apart.
    halves, pairs = x.unflatten(-1, (2, -1)), cos.shape[-1] // 2
    rotated = rotate_heads(halves[..., :pairs].flatten(-2), cos, sin).unflatten(-1, (2, -1))
    return torch.cat((rotated, halves[..., pairs:]), -1).flatten(-2)


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
