"""Length, batches and logging of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from outpace.errors import OptionError
from outpace.field_types import Bounds, Count, PositiveFloat, RandomSeed, check_bounds
from outpace.training import trackers

MAX_BATCH, MAX_BATCH_TOKENS = 2**16, 2**26
"""Maximum examples and maximum tokens of an update."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Length, batches, parallelism and logging of a training run.

    Attributes:
        steps: updates of the weights.
        epochs: passes over the data, instead of `steps`.
        batch: examples per update, over all processes.
        tokens: tokens per update, over all processes, instead of `batch`: examples are taken
            until they contain this many.
        balance: assign examples to processes and micro-batches by token count instead of
            round-robin; the update is the same up to rounding.
        accumulation: micro-batches per process and update (gradient accumulation).
        seed: of the data order, the noise and fresh weights.
        precision: `no` (the dtype of the weights) or `bf16` (autocast).
        log_every: steps between lines of the log.
        save_every: steps between checkpoints.
        recompute: keep only the inputs of blocks and recompute activations in the backward pass
            (gradient checkpointing): a third more compute, far less memory, the same loss.
        shard: shard weights, gradients and optimizer states over processes (FSDP2) instead of
            replicating them; in `bf16` forwards use bfloat16 weights.
        tracker: experiment tracker for the metrics: `tensorboard`, `trackio` or `wandb`.
    """

    steps: Count = 1000
    epochs: PositiveFloat | None = None
    batch: Annotated[int, Bounds(1, MAX_BATCH)] = 32
    tokens: Annotated[int, Bounds(1, MAX_BATCH_TOKENS)] | None = None
    balance: bool = False
    accumulation: Annotated[int, Bounds(1, MAX_BATCH)] = 1
    seed: RandomSeed = 0
    precision: Literal["no", "bf16"] = "no"
    log_every: Count = 20
    save_every: Count = 200
    recompute: bool = False
    shard: bool = False
    tracker: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.tokens is not None and self.epochs is not None:
            raise ValueError(
                f"epochs {self.epochs} cannot be combined with tokens {self.tokens}: the number "
                "of steps would depend on the lengths of examples; give steps instead"
            )
        trackers.check_tracker(self.tracker)

    def with_epochs(self, examples: int | None) -> Self:
        """Return the settings with `steps` computed from `epochs`, for an epoch of `examples`."""
        if self.epochs is None:
            return self
        if examples is None:
            raise ValueError(
                f"epochs {self.epochs} needs finite data, but generated problems are endless; "
                "give steps instead"
            )
        return replace(self, steps=math.ceil(self.epochs * examples / self.batch))

    def micro_batch_size(self, processes: int, longest: int = 1) -> int:
        """Return the number of examples of one micro-batch of one process.

        With `tokens`, a lower bound for examples of up to `longest` tokens.

        Raises:
            ValueError: the batch does not divide, or a micro-batch could be empty.
        """
        if processes < 1:
            raise OptionError("processes", processes, "must be at least 1")
        parts = processes * self.accumulation
        where = f"{processes} processes with accumulation {self.accumulation}"
        if self.tokens is not None:
            if self.tokens < parts * longest:
                raise ValueError(
                    f"tokens {self.tokens} may leave one of {where} without an example, since "
                    f"examples have up to {longest} tokens; raise tokens to {parts * longest}, or "
                    "lower data.longest"
                )
            return self.tokens // (parts * longest)
        if self.balance and self.batch < parts:
            raise ValueError(
                f"batch {self.batch} leaves some of {where} without an example; raise batch"
            )
        size, rest = divmod(self.batch, parts)
        if rest and not self.balance:
            raise ValueError(
                f"batch {self.batch} is not divisible by {where}; change batch, or set balance"
            )
        return size
