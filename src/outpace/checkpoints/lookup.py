"""Lookup of the family that reads a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.checkpoints.families import FAMILIES, Family
from outpace.checkpoints.fields import shorten


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """Return the family that reads this `config.json`.

    Raises:
        ValueError: For an unknown architecture, for several, and for custom code in the checkpoint
            that may compute something else.
    """
    names = config.get("architectures") or []
    family = match_architecture(names, config, path)
    if len(names) > 1:
        raise ValueError(
            f"{path}: architectures must name one architecture, got {shorten(names)}; "
            "keep the one of this checkpoint"
        )
    try:
        family.check_remote(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return family


def match_architecture(names: Any, config: Mapping[str, Any], path: Path) -> Family:
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    for family in FAMILIES.values():
        for name, field in family.aliases.items():
            if names == [name] and config.get(field) is not None:
                return family
    first = str(names[0]) if isinstance(names, list) and names else ""
    if first in known:
        return known[first]
    raise ValueError(
        f"{path}: architectures {shorten(names)} is not supported; known are "
        f"{', '.join(sorted(known))}"
    )
