"""Rotary position embedding (RoFormer, Su et al., 2021), half-split, with published scalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outpace.models.config import Rope


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
    """Rotate the first pairs of heads `x [T, heads, head_dim]`, as many as the tables have.

    The two dimensions of a pair are half a head apart.
    """
    halves, pairs = x.unflatten(-1, (2, -1)), cos.shape[-1] // 2
    rotated = rotate_heads(halves[..., :pairs].flatten(-2), cos, sin).unflatten(-1, (2, -1))
    return torch.cat((rotated, halves[..., pairs:]), -1).flatten(-2)
