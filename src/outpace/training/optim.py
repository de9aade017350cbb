"""Optimizers and the schedule of their learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from outpace.training.kinds import Bounds, Share, Weight, Whole, check_bounds

Inertia = Annotated[float, Bounds(0, 1, below=True)]


@dataclass(frozen=True, kw_only=True)
class Optim:
    """How weights are updated.

    Attributes:
        optimizer: `adamw`, or `muon` (Jordan et al., 2024) for matrices and AdamW for the rest.
        lr: largest learning rate; Muon's updates are scaled to AdamW's size, so one serves both.
        warmup: steps over which the rate rises from zero.
        decay: share of the steps, at the end, over which it falls; 0 is a constant rate.
        schedule: how it falls, `linear` or along a `cosine`.
        least: share of the rate that it falls to.
        weight_decay: decoupled decay of matrices.
        betas: of AdamW.
        momentum: of Muon.
        clip: largest norm of the gradient; 0 leaves it alone.
    """

    optimizer: str = "adamw"
    lr: Annotated[float, Bounds(0, 100, above=True)] = 3e-4
    warmup: Whole = 50
    decay: Share = 0.35
    schedule: str = "linear"
    least: Share = 0.0
    weight_decay: Annotated[float, Bounds(0, 100)] = 0.02
    betas: tuple[Inertia, Inertia] = (0.9, 0.98)
    momentum: Inertia = 0.95
    clip: Weight = 1.0

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer {self.optimizer!r} is unknown; choose adamw or muon")
        if self.schedule not in ("linear", "cosine"):
            raise ValueError(f"schedule {self.schedule!r} is unknown; choose linear or cosine")
        check_bounds(self)

    def build(self, model: nn.Module) -> list[Optimizer]:
        """Optimizers over the trainable parameters of a model."""
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        matrices, others, vectors = [], [], []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim < 2:
                vectors.append(parameter)
            elif id(parameter) in tables or "unembedding" in name or self.optimizer == "adamw":
                others.append(parameter)
            else:
                matrices.append(parameter)
        groups = [
            {"params": others, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        filled = [group for group in groups if group["params"]]
        built: list[Optimizer] = [AdamW(filled, lr=self.lr, betas=self.betas)] if filled else []
        if matrices:
            built.append(
                Muon(
                    matrices,
                    lr=self.lr,
                    weight_decay=self.weight_decay,
                    momentum=self.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if not built:
            raise ValueError("the model has no trainable parameters")
        return built

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step, counted from zero."""
        rise = min((step + 1) / (self.warmup + 1), 1.0)
        falling = self.decay * steps
        fall = min((steps - step) / (falling + 1), 1.0) if falling else 1.0
        if self.schedule == "cosine":
            fall = (1 - math.cos(math.pi * fall)) / 2
        return self.lr * min(rise, self.least + (1 - self.least) * fall)
