"""Mixture of experts in place of an MLP (Shazeer et al., 2017; Mixtral, Jiang et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.config import ModelConfig
from outpace.models.norm import build_norm

BuildMLP = Callable[[ModelConfig], nn.Module]
"""Creates an MLP of the width of a configuration."""


def build_feed_forward(config: ModelConfig, layer: int, make: BuildMLP) -> nn.Module:
    """Create the MLP or the mixture of experts of a layer."""
    if layer < config.dense_layers:
        return make(replace(config, mlp=config.dense_mlp))
    if config.experts_beside:
        return DenseAndExperts(config, make)
    return Experts(config, make) if config.experts else make(config)


class PreciseLinear(nn.Linear):
    """A linear layer in float32, whatever the dtype of the model: a router, or gates."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)


class ScaledRouter(nn.Linear):
    """A router of normalised rows, with a factor per dimension."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.dim, config.experts, bias=False)
        self.scale, self.eps = nn.Parameter(torch.ones(config.dim)), config.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)
        return super().forward(normed * self.scale * x.shape[-1] ** -0.5)


class Experts(nn.Module):
    """Several MLPs, of which each row uses the few with the highest router scores."""

    # The output is their mean weighted by the router's probabilities, normalised over the selected
    # experts with `norm_experts`. All rows also use the `shared` MLP, which may have a gate. With
    # `precise_router`, scores and sums are float32 and rounded once. `experts_beside` an MLP have a
    # scaled router, and a factor each.

    def __init__(self, config: ModelConfig, make: BuildMLP) -> None:
        super().__init__()
        self.precise = config.precise_router
        kind = PreciseLinear if self.precise else nn.Linear
        self.expert_scale: nn.Parameter | None = None
        if config.experts_beside:
            self.router: nn.Linear = ScaledRouter(config)
            self.expert_scale = nn.Parameter(torch.ones(config.experts))
        else:
            self.router = kind(config.dim, config.experts, bias=config.mlp_bias)
        self.experts = nn.ModuleList(make(config) for _ in range(config.experts))
        self.experts_per_row, self.normalises_weights = config.experts_per_row, config.norm_experts
        self.groups = config.expert_groups
        if self.groups is not None:
            self.preference = nn.Parameter(torch.zeros(config.experts))
        self.shared = make(replace(config, mlp=config.shared_mlp)) if config.shared_mlp else None
        self.shared_gate = nn.Parameter(torch.zeros(1, config.dim)) if config.shared_gate else None

    def forward(self, x: Tensor, scored: Tensor | None = None) -> Tensor:
        """Map rows `x [T, dim]`, selected by the router's scores of `scored`, by default `x`."""
        weights, indices = self.route_rows(self.router(x if scored is None else scored))
        sum_dtype = torch.float32 if self.precise else x.dtype
        weights, mapped = weights.to(sum_dtype), torch.zeros_like(x, dtype=sum_dtype)
        # In the order of the experts, so that the sum of a row is batch-invariant.
        for index in indices.unique().tolist():
            rows, places = (indices == index).nonzero(as_tuple=True)
            part = self.experts[index](x[rows]) * weights[rows, places, None]
            mapped.index_add_(0, rows, part)
        mapped = mapped.to(x.dtype)
        if self.shared is None:
            return mapped
        shared: Tensor = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * (x * self.shared_gate).sum(-1, keepdim=True).sigmoid()
        return mapped + shared

    def route_rows(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices `[T, chosen]` of the selected experts for scores `[T, E]`."""
        if self.groups is None:
            weights, indices = scores.softmax(-1, dtype=torch.float32).topk(self.experts_per_row)
        else:
            # DeepSeek-V3 (2024): groups are ranked by their two best experts.
            scores = scores.float().sigmoid()
            grouped = (scores + self.preference.float()).unflatten(-1, (self.groups.count, -1))
            best = grouped.topk(2).values.sum(-1).topk(self.groups.chosen).indices
            unselected = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(
                -1, best, False
            )
            indices = grouped.masked_fill(unselected[..., None], -torch.inf).flatten(1)
            indices = indices.topk(self.experts_per_row).indices
            weights = scores.gather(-1, indices)
        if self.normalises_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[indices]
        return (weights if self.groups is None else weights * self.groups.scale), indices


class DenseAndExperts(nn.Module):
    """An MLP and experts on the same rows, each normalised before and after, and added."""

    def __init__(self, config: ModelConfig, make: BuildMLP) -> None:
        super().__init__()
        self.dense_norm, self.dense_after = build_norm(config), build_norm(config)
        self.dense = make(replace(config, mlp=config.dense_mlp))
        self.experts_norm, self.experts_after = build_norm(config), build_norm(config)
        self.routed = Experts(config, make)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`, which the router reads before the norm."""
        dense: Tensor = self.dense_after(self.dense(self.dense_norm(x)))
        routed: Tensor = self.experts_after(self.routed(self.experts_norm(x), x))
        return dense + routed
