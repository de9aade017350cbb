"""Memory of the models of a figure, and which of them are loaded together."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from outpace.errors import OptionError
from outpace.lab.entry import MethodEntry
from outpace.lab.reproduce.figure import TRAINED, words_of

Entries = Sequence[MethodEntry]

CACHE_GIB = 2.0
"""Default size of the cache of each model; half of the free memory would leave none for others."""

RESERVE_GIB = 1.0
"""Memory of passes, beside weights and caches."""

QUANTIZED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5625}
"""Bytes of a number by weight format."""

SIZES = Path(__file__).parent / "models.toml"


def billions_of(name: str) -> float | None:
    """Return the billions of parameters of a published model or of a recipe; None if unknown."""
    if name.startswith(TRAINED):
        name = shlex.split(words_of(name))[0]
    billions: float | None = tomllib.loads(SIZES.read_text("utf-8")).get(name)
    return billions


def group_entries(entries: Entries) -> list[list[MethodEntry]]:
    """Group entries by their target and its adapter, which are loaded once."""
    groups: dict[tuple[str, str | None], list[MethodEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.model, entry.adapter), []).append(entry)
    return list(groups.values())


def gib_of(entries: Entries, number_bytes: float = 2.0, cache_gib: float = CACHE_GIB) -> float:
    """Return the GiB of weights and caches of entries; 0 if no model has a known size."""
    gib = 0.0
    for group in group_entries(entries):
        names = dict.fromkeys(name for entry in group for name in entry.model_names)
        for name in names:
            if (billions := billions_of(name)) is not None:
                is_adapter = name == group[0].adapter  # merged into its target
                gib += 0.0 if is_adapter else billions * 1e9 * number_bytes / 2**30 + cache_gib
    return gib


def fit_entries(
    entries: Entries, free_gib: float, number_bytes: float, cache_gib: float
) -> list[list[MethodEntry]]:
    """Split entries into as few parts as their order allows, each of which fits into memory."""
    parts: list[list[MethodEntry]] = []
    for group in group_entries(entries):
        need = gib_of(group, number_bytes, cache_gib) + RESERVE_GIB
        if gib_of(group) and need > free_gib:
            raise OptionError(
                "device",
                free_gib,
                f"{group[0].model} needs {need:.1f} GiB with its further models and caches, and "
                f"{free_gib:.1f} are free: use --quantize, a smaller --cache-gib or another device",
            )
        together = [*parts[-1], *group] if parts else group
        if parts and gib_of(together, number_bytes, cache_gib) + RESERVE_GIB <= free_gib:
            parts[-1] = together
        else:
            parts.append(group)
    return parts
