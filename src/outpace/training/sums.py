"""Metric sums accumulated over steps and processes, and their means."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

MetricSums = Mapping[str, tuple[Tensor, Tensor]]
"""Maps a metric's name to (sum, count)."""


class MetricAccumulator:
    """Metric sums of one process, reduced over all processes on demand."""

    def __init__(
        self, accelerator: Accelerator, initial: Mapping[str, tuple[float, float]]
    ) -> None:
        """Start from `initial`, sums over all processes such as those of a checkpoint."""
        self.accelerator = accelerator
        # Only the main process starts from them, so that the reduction counts them once.
        is_main = torch.tensor(float(accelerator.is_main_process), device=accelerator.device)
        self.sums = {name: [is_main * part for part in pair] for name, pair in initial.items()}

    def add(self, pairs: MetricSums) -> None:
        """Add sums of this process."""
        for name, pair in pairs.items():
            old = self.sums.get(name, [torch.zeros_like(part) for part in pair])
            self.sums[name] = [old[0] + pair[0], old[1] + pair[1]]

    def reduce_sums(self) -> dict[str, tuple[float, float]]:
        """Return the sums over all processes; a collective operation."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        flat = torch.stack([part for name in names for part in self.sums[name]])
        values = self.accelerator.reduce(flat, reduction="sum").view(-1, 2).tolist()
        return {name: (total, over) for name, (total, over) in zip(names, values, strict=True)}


def compute_means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Divide each sum by its count.

    Raises:
        ValueError: a mean is not finite, so the run has diverged.
    """
    quotients = {name: total / max(over, 1e-9) for name, (total, over) in sums.items()}
    if diverged := [name for name, value in quotients.items() if not math.isfinite(value)]:
        raise ValueError(
            f"{' and '.join(diverged)} became {quotients[diverged[0]]}: training has diverged; "
            "lower lr, raise warmup, or clip the gradient. No checkpoint of this step is saved"
        )
    return quotients
