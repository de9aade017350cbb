"""A mixture of experts in place of an MLP (Shazeer et al., 2017; Mixtral, Jiang et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from outpace.models.config import ModelConfig


class Experts(nn.Module):
    """Several MLPs; each row goes through the few that its router prefers, and is their mean.

    The weights of that mean are the router's probabilities, of the chosen ones alone where
    `norm_experts` says so.
    """

    def __init__(self, config: ModelConfig, make: Callable[[ModelConfig], nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(config.dim, config.experts, bias=config.mlp_bias)
        self.experts = nn.ModuleList(make(config) for _ in range(config.experts))
        self.chosen, self.norms = config.experts_per_row, config.norm_experts

    def forward(self, x: Tensor) -> Tensor:
        """Map rows `x [T, dim]`."""
        shares, numbers = self.router(x).softmax(-1, dtype=torch.float32).topk(self.chosen)
        if self.norms:
            shares = shares / shares.sum(-1, keepdim=True)
        shares = shares.to(x.dtype)
        mapped = torch.zeros_like(x)
        # In the order of the experts, so that a row has the same sum in any company.
        for number in numbers.unique().tolist():
            rows, places = (numbers == number).nonzero(as_tuple=True)
            part = self.experts[number](x[rows]) * shares[rows, places, None]
            mapped.index_add_(0, rows, part)
        return mapped
