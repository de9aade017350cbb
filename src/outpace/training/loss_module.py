"""Loss module: model and objective as one `nn.Module`, as FSDP and DDP require."""

from __future__ import annotations

import warnings
from copy import deepcopy

import torch
from torch import Tensor, nn

from outpace.models.transformer import Stack, Transformer
from outpace.training.feature_spec import FeatureSpec
from outpace.training.objective import Models, Objective
from outpace.training.rows import Rows

LossAndMetrics = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]
"""A summed loss, and its metrics."""


class LossModule(nn.Module):
    """A module whose forward computes the loss of rows, so that wrappers see all of it."""

    def __init__(self, objective: Objective, models: Models, precision: str) -> None:
        super().__init__()
        self.objective, self.models, self.precision = objective, models, precision
        self.trained = models.trained

    def forward(self, rows: Rows, reading: FeatureSpec | None = None) -> LossAndMetrics | Tensor:
        """Compute the loss of rows; given `reading`, the target's states of that feature spec."""
        # Accelerate's own setting would apply to all trainers of the process.
        with torch.autocast(rows.ids.device.type, torch.bfloat16, self.precision == "bf16"):
            if reading is not None:
                target = self.models.others["target"]
                return reading.joined_states(target, rows.ids, rows.positions, rows.ranges)
            loss = self.objective.loss(self.models, rows)
        return loss.total, loss.metrics


def build_teachers(objective: Objective, model: Stack, adapted: bool) -> dict[str, Transformer]:
    """Copy the initial model as teacher if needed; under an adapter it shares the weights."""
    if not objective.needs_teacher:
        return {}
    assert isinstance(model, Transformer)
    shared = (*model.parameters(), *model.buffers()) if adapted else ()
    return {"teacher": deepcopy(model, {id(parameter): parameter for parameter in shared})}


def ignore_norm_advice() -> None:
    """Ignore PyTorch's advice on norms of mixed precision: a CPU has no fused one to choose."""
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
