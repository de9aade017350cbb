"""A mixture of experts in place of an MLP (Shazeer et al., 2017; Mixtral, Jiang et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.models.config import ModelConfig

Make = Callable[[ModelConfig], nn.Module]
"""An MLP of the width of a configuration."""


def feed_forward(config: ModelConfig, layer: int, make: Make) -> nn.Module:
    """What stands behind the attention of a layer: an MLP, or a mixture of experts."""
    if layer < config.dense_layers:
        return make(replace(config, mlp=config.dense_mlp))
    return Experts(config, make) if config.experts else make(config)


class PreciseRouter(nn.Linear):
    """A router whose scores are float32, whatever the dtype of the model."""

    def forward(self, x: Tensor) -> Tensor:
        """Scores `f32[T, E]` of rows `x [T, dim]`."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)


class Experts(nn.Module):
    """Several MLPs; each row goes through the few that its router prefers, and is their mean.

    The weights of that mean are the router's probabilities, of the chosen ones alone where
    `norm_experts` says so. What is `shared` all rows go through besides. With `precise_router`,
    scores and sums are float32, and rounded to the dtype of the rows once.
    """

    def __init__(self, config: ModelConfig, make: Make) -> None:
        super().__init__()
        self.precise = config.precise_router
        kind = PreciseRouter if self.precise else nn.Linear
        self.router = kind(config.dim, config.experts, bias=config.mlp_bias)
        self.experts = nn.ModuleList(make(config) for _ in range(config.experts))
        self.chosen, self.norms = config.experts_per_row, config.norm_experts
        self.groups = config.expert_groups
        if self.groups is not None:
            self.preference = nn.Parameter(torch.zeros(config.experts))
        self.shared = make(replace(config, mlp=config.shared_mlp)) if config.shared_mlp else None

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        shares, numbers = self.route(self.router(x))
        wide = torch.float32 if self.precise else x.dtype
        shares, mapped = shares.to(wide), torch.zeros_like(x, dtype=wide)
        # In the order of the experts, so that a row has the same sum in any company.
        for number in numbers.unique().tolist():
            rows, places = (numbers == number).nonzero(as_tuple=True)
            part = self.experts[number](x[rows]) * shares[rows, places, None]
            mapped.index_add_(0, rows, part)
        mapped = mapped.to(x.dtype)
        return mapped if self.shared is None else mapped + self.shared(x)

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers `[T, chosen]` of the experts of rows, by their scores `[T, E]`."""
        if self.groups is None:
            shares, numbers = scores.softmax(-1, dtype=torch.float32).topk(self.chosen)
        else:
            # DeepSeek-V3 (2024): groups are ranked by their two best experts.
            scores = scores.float().sigmoid()
            grouped = (scores + self.preference.float()).unflatten(-1, (self.groups.count, -1))
            best = grouped.topk(2).values.sum(-1).topk(self.groups.chosen).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            numbers = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)
            numbers = numbers.topk(self.chosen).indices
            shares = scores.gather(-1, numbers)
        if self.norms:
            shares = shares / shares.sum(-1, keepdim=True)
        return (shares if self.groups is None else shares * self.groups.scale), numbers
