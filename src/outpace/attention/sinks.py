"""Attention of heads with optional sinks: scores that take weight but have no value (gpt-oss)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_SCORES = 2**26
"""Maximum number of scores in memory at a time; at least one row is processed."""


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with `q [B, H, n, D]` over `k, v [B, K, S, D]`, with optional sinks.

    Args:
        q: queries, `[B, H, n, D]`.
        k: keys, `[B, K, S, D]`.
        v: values, `[B, K, S, D]`.
        mask: `[..., n, S]`, added to the scores, or boolean: True where a key is visible.
        causal: whether to apply a causal mask.
        sinks: additional scores of the softmax, `[1, H, n or 1, 1]`. PyTorch has no kernel for
            them.

    Returns:
        `[B, H, n, D]`.
    """
    shared = q.shape[1] // k.shape[1]
    if sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared > 1
        )
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=q.device).masked_fill_(~mask, -torch.inf)
    if shared > 1:
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    sinks = sinks.expand(*q.shape[:3], 1)
    block = max(MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]), 1)
    parts = []
    for first in range(0, q.shape[2], block):
        rows = slice(first, first + block)
        own = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        parts.append(attention_weights(q[:, :, rows], k, own, sinks[:, :, rows]) @ v)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Return the weight of each key, `[B, H, n, S]`, without those of the sinks."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    every = torch.cat((scores, sinks.to(scores.dtype)), -1)
    return every.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))[..., :-1].to(
        q.dtype
    )
