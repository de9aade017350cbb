"""Sums over steps and processes, and the means that come of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""Name to (sum, count)."""


class Sums:
    """What one process counts, until all of them add it up."""

    def __init__(self, accelerator: Accelerator, begun: Mapping[str, tuple[float, float]]) -> None:
        """Go on with what all processes had counted."""
        self.accelerator = accelerator
        # One process goes on with it; those of the others are zeros.
        mine = torch.tensor(float(accelerator.is_main_process), device=accelerator.device)
        self.pairs = {name: [mine * part for part in pair] for name, pair in begun.items()}

    def add(self, pairs: Pairs) -> None:
        """Count on this process."""
        for name, pair in pairs.items():
            old = self.pairs.get(name, [torch.zeros_like(part) for part in pair])
            self.pairs[name] = [old[0] + pair[0], old[1] + pair[1]]

    def reduced(self) -> dict[str, tuple[float, float]]:
        """The sums over all processes."""
        if not self.pairs:
            return {}
        names = sorted(self.pairs)
        flat = torch.stack([part for name in names for part in self.pairs[name]])
        values = self.accelerator.reduce(flat, reduction="sum").view(-1, 2).tolist()
        return {name: (total, over) for name, (total, over) in zip(names, values, strict=True)}


def means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Sum over count of each; `ValueError` where one is no number any more."""
    found = {name: total / max(over, 1e-9) for name, (total, over) in sums.items()}
    if broken := [name for name, value in found.items() if not math.isfinite(value)]:
        raise ValueError(
            f"{' and '.join(broken)} became {found[broken[0]]}, so that nothing more is learnt; "
            "lower lr, raise warmup, or clip the gradient; nothing of it is saved"
        )
    return found
