"""Attention over packed rows in training, with the attention window of each layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outpace.attention.ranges import RangesAttention, narrowed
from outpace.models.config import ModelConfig, Sight
from outpace.models.draft import Draft
from outpace.models.transformer import Attend, Transformer
from outpace.training.rows import Rows


def hidden_states(model: Transformer | Draft, rows: Rows) -> Tensor:
    """Return a model's hidden states of packed rows, `[T, dim]`."""
    attend = over_rows(model.config, rows.ranges, rows.ids.device)
    hidden: Tensor = model(rows.ids, rows.positions, attend)
    return hidden


def over_rows(config: ModelConfig, ranges: Tensor, device: torch.device) -> Attend:
    """Plan the attention of packed rows, once for all layers."""
    own = torch.arange(len(ranges))
    return by_layer(config, lambda sight: RangesAttention(through(sight, ranges, own), device))


def by_layer(config: ModelConfig, plan: Callable[[Sight], Attend]) -> Attend:
    """Plan one attention per distinct attention window; return a dispatcher by layer."""
    if not config.sights:
        return plan(Sight())
    plans = {sight: plan(sight) for sight in set(config.sights)}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return plans[config.sights[layer]](layer, q, k, v, sinks)

    return attend


def through(sight: Sight, ranges: Tensor, own: Tensor) -> Tensor:
    """Narrow ranges to a layer's attention window; `own i64[T]` are the rows' own keys."""
    return narrowed(ranges, own, window=sight.window, causal=sight.causal)
