"""A model with what it learns, as one module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outpace.training.objective import Models, Objective
from outpace.training.rows import Rows


class Scored(nn.Module):
    """Model and objective as one module, so that what wraps it sees the whole loss."""

    def __init__(self, objective: Objective, models: Models, precision: str) -> None:
        super().__init__()
        self.objective, self.models, self.precision = objective, models, precision
        self.trained = models.trained

    def forward(self, rows: Rows) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The weighted sum over rows, and the metrics."""
        # Accelerate would fix the precision for all trainers of the process.
        with torch.autocast(rows.ids.device.type, torch.bfloat16, self.precision == "bf16"):
            loss = self.objective.loss(self.models, rows)
        return loss.total, loss.metrics
