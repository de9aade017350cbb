"""Attention over packed rows in training, with the attention window of each layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.attention.ranges import RangesAttention, narrow_to_window
from outpace.models.config import AttentionWindow, ModelConfig
from outpace.models.draft import Draft
from outpace.models.transformer import Attend, Transformer
from outpace.training.rows import Rows


def hidden_states(model: Transformer | Draft, rows: Rows) -> Tensor:
    """Return a model's hidden states of packed rows, `[T, dim]`."""
    attend = plan_row_attention(model.config, rows.ranges, rows.ids.device)
    hidden: Tensor = model(rows.ids, rows.positions, attend)
    return hidden


def plan_row_attention(config: ModelConfig, ranges: Tensor, device: torch.device) -> Attend:
    """Plan the attention of packed rows, once for all layers."""
    own = torch.arange(len(ranges))
    return plan_layer_attention(
        config, lambda sight: RangesAttention(narrow_ranges(sight, ranges, own), device)
    )


def plan_layer_attention(config: ModelConfig, plan: Callable[[AttentionWindow], Attend]) -> Attend:
    """Plan one attention per distinct attention window; return a dispatcher by layer."""
    if not config.sights:
        return plan(AttentionWindow())
    plans = {sight: plan(sight) for sight in set(config.sights)}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return plans[config.sights[layer]](layer, q, k, v, sinks)

    return attend


def narrow_ranges(sight: AttentionWindow, ranges: Tensor, own: Tensor) -> Tensor:
    """Narrow ranges to a layer's attention window; `own i64[T]` are the rows' own keys."""
    return narrow_to_window(ranges, own, window=sight.window, causal=sight.causal)
