"""How long and in what portions a run trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from outpace.training import trackers

MOST = 2**16
"""Examples of an update."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long and in what portions a run trains.

    Attributes:
        steps: updates of the weights.
        epochs: so many times through the data, instead of `steps`.
        batch: examples per update, over all processes.
        accumulation: portions in which a process feeds its share of them.
        seed: of the data order, the noise and fresh weights.
        precision: `no` (the dtype of the weights) or `bf16` (autocast).
        log_every: steps between lines of the log.
        save_every: steps between checkpoints.
        recompute: keep the inputs of blocks only and make the rest again in the backward pass
            (gradient checkpointing): a third more work for far less memory, and the same loss.
        shard: let processes share out weights, gradients and optimizer states (FSDP2), instead of
            each having all of them; in `bf16` they compute with weights of bfloat16.
        tracker: where the log goes as well: `tensorboard`, `trackio` or `wandb`.
    """

    steps: int = 1000
    epochs: float | None = None
    batch: int = 32
    accumulation: int = 1
    seed: int = 0
    precision: str = "no"
    log_every: int = 20
    save_every: int = 200
    recompute: bool = False
    shard: bool = False
    tracker: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulation", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.batch > MOST:
            raise ValueError(f"batch must be at most {MOST} examples, not {self.batch}")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be a number above 0, not {self.epochs}")
        if self.precision not in ("no", "bf16"):
            raise ValueError(f"precision {self.precision!r} is unknown; choose no or bf16")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, not {self.seed}")
        trackers.check(self.tracker)

    def over(self, examples: int | None) -> Self:
        """The settings with the steps that `epochs` are, in an epoch of so many examples."""
        if self.epochs is None:
            return self
        if examples is None:
            raise ValueError(f"epochs {self.epochs} of data without end; give steps instead")
        return replace(self, steps=math.ceil(self.epochs * examples / self.batch))

    def share(self, processes: int) -> int:
        """Examples of one portion of one process; refuses a batch that does not divide."""
        if processes < 1:
            raise ValueError(f"processes must be at least 1, not {processes}")
        size, rest = divmod(self.batch, processes * self.accumulation)
        if rest:
            raise ValueError(
                f"batch {self.batch} does not divide into {processes} processes with "
                f"accumulation {self.accumulation}"
            )
        return size
