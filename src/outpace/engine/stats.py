"""Statistics of an engine at one moment."""

from __future__ import annotations

from typing import NamedTuple

from outpace.engine.engine import Engine
from outpace.engine.runner import CacheUsage


class Stats(NamedTuple):
    """Requests and memory of an engine.

    Attributes:
        waiting: requests without memory yet.
        running: requests with memory.
        models: pages of each model's cache.
    """

    waiting: int
    running: int
    models: tuple[CacheUsage, ...]

    @classmethod
    def from_engine(cls, engine: Engine) -> Stats:
        """Read the statistics of an engine, from any thread."""
        models = tuple(runner.cache_usage for runner in engine.runners)
        return cls(len(engine.queue), len(engine.running), models)

    @property
    def held_pages(self) -> int:
        """Pages that requests hold, in the caches of all models."""
        return sum(model.held_pages for model in self.models)

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests, and no memory of earlier ones is held."""
        return not (self.waiting or self.running or self.held_pages)
