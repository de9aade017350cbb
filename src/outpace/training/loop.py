"""Length, batches and logging of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from outpace.errors import OptionError
from outpace.field_types import Bounds, Count, PositiveFloat, RandomSeed, check_fields
from outpace.training import trackers

MAX_BATCH, MAX_BATCH_TOKENS = 2**16, 2**26
"""Maximum examples and maximum tokens of an update."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Length, batches, parallelism and logging of a training run."""

    steps: Count = 1000
    """Updates of the weights."""
    epochs: PositiveFloat | None = None
    """Passes over the data, instead of `steps`."""
    batch: Annotated[int, Bounds(1, MAX_BATCH)] = 32
    """Examples per update, over all processes."""
    tokens: Annotated[int, Bounds(1, MAX_BATCH_TOKENS)] | None = None
    """Tokens per update, over all processes, instead of `batch`: examples are taken until they
    contain this many."""
    balance: bool = False
    """Assign examples to processes and micro-batches by token count instead of round-robin; the
    update is the same up to rounding."""
    accumulation: Annotated[int, Bounds(1, MAX_BATCH)] = 1
    """Micro-batches per process and update (gradient accumulation)."""
    seed: RandomSeed = 0
    """Of the data order, the noise and fresh weights."""
    precision: Literal["no", "bf16"] = "no"
    """`no` (the dtype of the weights) or `bf16` (autocast)."""
    log_every: Count = 20
    """Steps between lines of the log."""
    save_every: Count = 200
    """Steps between checkpoints."""
    recompute: bool = False
    """Keep only the inputs of blocks and recompute activations in the backward pass (gradient
    checkpointing): a third more compute, far less memory, the same loss."""
    shard: bool = False
    """Shard weights, gradients and optimizer states over processes (FSDP2) instead of replicating
    them; in `bf16` forwards use bfloat16 weights."""
    tracker: str | None = None
    """Experiment tracker for the metrics: `tensorboard`, `trackio` or `wandb`."""

    def __post_init__(self) -> None:
        check_fields(self)
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
