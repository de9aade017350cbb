"""Models that figures need and nobody ships: what trains each."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from outpace.benchmark.entry import Entry

TRAINED = "trained:"
"""In front of the name of such a model."""

TABLE = Path(__file__).parent / "trained.toml"


def words_of(name: str) -> list[str]:
    """The words of `outpace train` for a model's name; `ValueError` for an unknown one."""
    known: dict[str, str] = tomllib.loads(TABLE.read_text())
    plain = name.removeprefix(TRAINED)
    if plain not in known:
        raise ValueError(f"nothing trains {plain!r}; known are {', '.join(known)}")
    return shlex.split(known[plain])


def needed(entries: Sequence[Entry]) -> list[str]:
    """Names of the models that must be trained for some entries, each once."""
    names = (
        str(name) for e in entries for name in (e.model, e.adapter, *e.method.models().values())
    )
    return [name for name in dict.fromkeys(names) if name.startswith(TRAINED)]
