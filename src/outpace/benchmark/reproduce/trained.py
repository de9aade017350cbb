"""Models that figures need and that are not published, with the training of each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from outpace.benchmark.entry import MethodEntry

TRAINED = "trained:"
"""Prefix of the name of such a model."""

TABLE = Path(__file__).parent / "trained.toml"


def words_of(name: str) -> str:
    """Return the arguments of `outpace train` for a model; `ValueError` for an unknown one."""
    known: dict[str, str] = tomllib.loads(TABLE.read_text("utf-8"))
    plain = name.removeprefix(TRAINED)
    if plain not in known:
        raise ValueError(f"nothing trains {plain!r}; known are {', '.join(known)}")
    return known[plain]


def needed(entries: Iterable[MethodEntry]) -> dict[str, str]:
    """Return the models that must be trained for entries, with the arguments of each."""
    names = dict.fromkeys(name for entry in entries for name in entry.model_names)
    return {name: words_of(name) for name in names if name.startswith(TRAINED)}
