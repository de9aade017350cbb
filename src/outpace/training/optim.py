"""Optimizers and their learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from outpace.field_types import Bounds, Fraction, NonNegativeInt, Weight, check_fields
from outpace.models.device import computes_bfloat16

HEADS = ("unembedding", "transition", "acceptance")
"""Output heads of models and drafts: of tokens, of tokens after a token, and of acceptance."""


class WideMuon(Muon):
    """Muon with products in float32 on a processor without those in bfloat16."""

    # There products in bfloat16 take 26 times as long: 8 seconds per step for a matrix of 576 by
    # 2,880, on one core of an AMD EPYC (Zen 3).

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if computes_bfloat16(self.param_groups[0]["params"][0].device):
            return super().step(closure)  # type: ignore[no-untyped-call]
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state, momentum = self.state[parameter], group["momentum"]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(parameter.grad))
                buffer.lerp_(parameter.grad, 1 - momentum)
                update = orthogonalize(
                    parameter.grad.lerp(buffer, momentum),
                    group["ns_coefficients"],
                    group["ns_steps"],
                )
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                # As large as AdamW's.
                parameter.add_(update, alpha=-0.2 * group["lr"] * max(parameter.shape) ** 0.5)
        return None


def orthogonalize(matrix: Tensor, weights: tuple[float, float, float], steps: int) -> Tensor:
    """Move the singular values of a matrix towards 1 by Newton-Schulz iterations."""
    linear, cubic, quintic = weights
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(
            wide, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), wide, beta=linear
        )
    return wide if len(matrix) <= matrix.shape[1] else wide.T


Momentum = Annotated[float, Bounds(0, 1, below=True)]


@dataclass(frozen=True, kw_only=True)
class Optim:
    """Optimizer, learning-rate schedule and gradient clipping."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon` (Jordan et al., 2024) for matrices and AdamW for the rest."""
    lr: Annotated[float, Bounds(0, 100, above=True)] = 3e-4
    """Peak learning rate; Muon's updates are scaled to AdamW's size, so both share it."""
    warmup: NonNegativeInt = 50
    """Steps over which the rate rises linearly from zero."""
    decay: Fraction = 0.35
    """Fraction of the steps, at the end, over which it falls; 0 is a constant rate."""
    schedule: Literal["linear", "cosine"] = "linear"
    """Shape of the decay, `linear` or `cosine`."""
    least: Fraction = 0.0
    """Fraction of `lr` at the end of the decay."""
    weight_decay: Annotated[float, Bounds(0, 100)] = 0.02
    """Decoupled decay of matrices."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.98)
    """Of AdamW."""
    clip: Weight = 1.0
    """Maximum gradient norm; 0 disables clipping."""

    def __post_init__(self) -> None:
        check_fields(self)

    def build_optimizers(self, model: nn.Module) -> list[Optimizer]:
        """Build optimizers over a model's trainable parameters.

        Embeddings, heads and vectors always use AdamW.
        """
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        matrices, others, vectors = [], [], []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            is_table = id(parameter) in tables or not {*HEADS}.isdisjoint(name.split("."))
            # Muon orthogonalises the update of a map between hidden spaces. The rows of a table are
            # looked up one by one, and are no such map.
            if parameter.ndim < 2:
                vectors.append(parameter)
            elif is_table or self.optimizer == "adamw":
                others.append(parameter)
            else:
                matrices.append(parameter)
        groups = [
            {"params": others, "weight_decay": self.weight_decay},
            # Norms and biases are not decayed, as is usual.
            {"params": vectors, "weight_decay": 0.0},
        ]
        used = [group for group in groups if group["params"]]
        optimizers: list[Optimizer] = [AdamW(used, lr=self.lr, betas=self.betas)] if used else []
        if matrices:
            optimizers.append(
                WideMuon(
                    matrices,
                    lr=self.lr,
                    weight_decay=self.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if not optimizers:
            raise ValueError("the model has no trainable parameters")
        return optimizers

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from zero."""
        rise = min((step + 1) / (self.warmup + 1), 1.0)
        decay_steps = self.decay * steps
        fall = min((steps - step) / (decay_steps + 1), 1.0) if decay_steps else 1.0
        if self.schedule == "cosine":
            fall = (1 - math.cos(math.pi * fall)) / 2
        return self.lr * min(rise, self.least + (1 - self.least) * fall)
