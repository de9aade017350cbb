"""A model with what it learns, as one module."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from outpace.models.transformer import Stack, Transformer
from outpace.training.objective import Models, Objective
from outpace.training.reading import Reading
from outpace.training.rows import Rows

Outcome = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""A loss, and its metrics."""


class Scored(nn.Module):
    """Model and objective as one module, so that what wraps it sees the whole loss."""

    def __init__(self, objective: Objective, models: Models, precision: str) -> None:
        super().__init__()
        self.objective, self.models, self.precision = objective, models, precision
        self.trained = models.trained

    def forward(self, rows: Rows, reading: Reading | None = None) -> Outcome | Tensor:
        """The weighted sum over rows, and the metrics; or what a `reading` of the target is."""
        # Accelerate would fix the precision for all trainers of the process.
        with torch.autocast(rows.ids.device.type, torch.bfloat16, self.precision == "bf16"):
            if reading is not None:
                target = self.models.others["target"]
                return reading.joined(target, rows.ids, rows.positions, rows.ranges)
            loss = self.objective.loss(self.models, rows)
        return loss.total, loss.metrics


def teachers(objective: Objective, model: Stack, adapted: bool) -> dict[str, Transformer]:
    """The model as it starts; under an adapter it shares the weights, which stay as they are."""
    if not objective.taught:
        return {}
    assert isinstance(model, Transformer)
    kept = (*model.parameters(), *model.buffers()) if adapted else ()
    return {"teacher": deepcopy(model, {id(parameter): parameter for parameter in kept})}
