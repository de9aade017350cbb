"""The device that is measured: what it can do at best, random models on it, and its time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from checkpoints import Config
from harness import Bar, Budget, Row
from outpace.checkpoints.checkpoint import translate_config
from outpace.decoding import DRAFT_KINDS
from outpace.engine.graphs import make_recorder
from outpace.engine.runner import Runner
from outpace.models.extending import build_draft_model
from outpace.models.transformer import Stack, Transformer

Found = tuple[dict[str, list[Row]], list[Bar]]
"""Tables by title, and bars: the result of each part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where random models are made, in which dtype, and sizes that they do not exceed.

    With `graphs` passes of a shape that came before run in one launch; with `compile` layers are
    compiled. `copied` bytes are moved to see how fast the memory is, and matrices of `multiplied`
    rows and columns for the products.
    """

    device: str
    dtype: torch.dtype
    most: Config
    copied: int = 2**30
    multiplied: int = 8192
    graphs: bool = False
    compile: bool = False

    def model(self, published: Config, target: Stack | None = None) -> Stack:
        """A model, or a draft of a `target`, that is only run."""
        config = translate_config(shrunk(published, self.most))
        with torch.device(self.device):
            if config.kind in DRAFT_KINDS:
                assert isinstance(target, Transformer)
                made: Stack = build_draft_model(config, target)
            else:
                made = Transformer(config)
        return made.to(self.dtype).eval().requires_grad_(False)

    def runner(self, name: str, model: Stack, slots: int) -> Runner:
        """A model with a cache that is full of random numbers, and finds nothing in it."""
        record = make_recorder(self.graphs, torch.device(self.device), 1)
        runner = Runner(
            name, model, slots=slots, prefix_cache=False, record=record, compile=self.compile
        )
        runner.cache.memories[0].normal_()
        return runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a device can do at best: bytes moved, and operations of products, per second."""

    copied: float
    multiplied: float

    @classmethod
    def of(cls, where: Where) -> Card:
        """Measured, since what is printed on a card is never reached."""
        return cls(
            copied=bandwidth(where.device, where.copied),
            multiplied=products(where.device, where.dtype, where.multiplied),
        )

    @property
    def row(self) -> Row:
        """The same as a row of a table."""
        return {"copy GB/s": self.copied / 1e9, "products TFLOP/s": self.multiplied / 1e12}


@dataclass(frozen=True, slots=True)
class Setup:
    """What each part receives: where it runs, what the device can do, and the time that is left."""

    where: Where
    card: Card
    budget: Budget


def shrunk(published: Config, most: Config) -> Config:
    """A shape none of whose sizes is larger than these."""
    return {
        name: min(value, most[name])
        if type(value) is int and name in most
        else most.get(name, value)
        if isinstance(value, dict)
        else value
        for name, value in published.items()
    }


def bandwidth(device: str, size: int) -> float:
    """Bytes that are read and written per second in a copy of `size` bytes."""
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(memory)
    return 2 * size / timed(lambda: other.copy_(memory))


def products(device: str, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a product of two square matrices."""
    one, other = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / timed(lambda: one @ other)


def wait() -> None:
    """Until a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], object], rounds: int = 9, calls: int = 10) -> float:
    """Median seconds of a call among several, once all is compiled; a CPU makes one at a time."""
    calls = calls if torch.cuda.is_available() else 1
    seconds = []
    for number in range(rounds + 1):
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        if number:
            seconds.append((time.perf_counter() - began) / calls)
    return statistics.median(seconds)


def clear() -> None:
    """Give memory of models that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
