"""How long and in what portions a run trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Self

from outpace.training import trackers
from outpace.training.kinds import Bounds, Count, Positive, Seed, check_bounds

MOST, MOST_TOKENS = 2**16, 2**26
"""Examples of an update, and tokens of one."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How long and in what portions a run trains.

    Attributes:
        steps: updates of the weights.
        epochs: so many times through the data, instead of `steps`.
        batch: examples per update, over all processes.
        tokens: of the examples of an update, over all processes, instead of `batch`: examples are
            taken until they hold so many.
        balance: hand examples to processes and portions so that each has about as many tokens,
            instead of in turn; the update is the same up to rounding.
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

    steps: Count = 1000
    epochs: Positive | None = None
    batch: Annotated[int, Bounds(1, MOST)] = 32
    tokens: Annotated[int, Bounds(1, MOST_TOKENS)] | None = None
    balance: bool = False
    accumulation: Annotated[int, Bounds(1, MOST)] = 1
    seed: Seed = 0
    precision: str = "no"
    log_every: Count = 20
    save_every: Count = 200
    recompute: bool = False
    shard: bool = False
    tracker: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.tokens is not None and self.epochs is not None:
            raise ValueError(
                f"epochs {self.epochs} are as many steps as the lengths of examples make of tokens "
                f"{self.tokens}; give steps instead"
            )
        if self.precision not in ("no", "bf16"):
            raise ValueError(f"precision {self.precision!r} is unknown; choose no or bf16")
        trackers.check(self.tracker)

    def over(self, examples: int | None) -> Self:
        """The settings with the steps that `epochs` are, in an epoch of so many examples."""
        if self.epochs is None:
            return self
        if examples is None:
            raise ValueError(f"epochs {self.epochs} of data without end; give steps instead")
        return replace(self, steps=math.ceil(self.epochs * examples / self.batch))

    def of_length(self, tokens: float, processes: int) -> Self:
        """The settings with a `batch` in the place of `tokens`, for examples of so many each."""
        if self.tokens is None:
            return self
        parts = processes * self.accumulation
        return replace(self, tokens=None, batch=parts * max(round(self.tokens / tokens / parts), 1))

    def share(self, processes: int, longest: int = 1) -> int:
        """Examples of one portion of one process, or of `longest` tokens as many as surely fit.

        Raises `ValueError` for a batch that does not divide, and for tokens or a batch that may
        leave a portion empty.
        """
        if processes < 1:
            raise ValueError(f"processes must be at least 1, not {processes}")
        parts = processes * self.accumulation
        where = f"{processes} processes with accumulation {self.accumulation}"
        if self.tokens is not None:
            if self.tokens < parts * longest:
                raise ValueError(
                    f"tokens {self.tokens} may leave nothing to one of {where}, where examples "
                    f"have up to {longest}; raise tokens to {parts * longest}, or lower "
                    "data.longest"
                )
            return self.tokens // (parts * longest)
        if self.balance and self.batch < parts:
            raise ValueError(f"batch {self.batch} leaves nothing to some of {where}; raise batch")
        size, rest = divmod(self.batch, parts)
        if rest and not self.balance:
            raise ValueError(
                f"batch {self.batch} does not divide into {where}; give one that does, or balance"
            )
        return size
