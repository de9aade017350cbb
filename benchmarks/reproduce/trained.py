"""Models that figures need and nobody ships: what trains each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from outpace.benchmark.entry import MethodEntry

TRAINED = "trained:"
"""In front of the name of such a model."""

TABLE = Path(__file__).parent / "trained.toml"


def words_of(name: str) -> str:
    """What `outpace train` is told for a model's name; `ValueError` for an unknown one."""
    known: dict[str, str] = tomllib.loads(TABLE.read_text("utf-8"))
    plain = name.removeprefix(TRAINED)
    if plain not in known:
        raise ValueError(f"nothing trains {plain!r}; known are {', '.join(known)}")
    return known[plain]


def needed(entries: Iterable[MethodEntry]) -> dict[str, str]:
    """The models that must be trained for some entries, each with what trains it."""
    names = dict.fromkeys(name for entry in entries for name in entry.model_names)
    return {name: words_of(name) for name in names if name.startswith(TRAINED)}
