"""The family that reads a `config.json`, if one does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.checkpoints.families import FAMILIES, Family
from outpace.checkpoints.families.drafts import LATER
from outpace.checkpoints.fields import brief


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """Family that reads this `config.json`.

    Raises `ValueError` for an unknown architecture, for several, and for code of a checkpoint that
    may compute something else.
    """
    names = config.get("architectures") or []
    family = named_family(names, config, path)
    if len(names) > 1:
        raise ValueError(
            f"{path}: architectures {brief(names)} names several, but a checkpoint is of one; keep "
            "the one that it is"
        )
    try:
        family.check_remote(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return family


def named_family(names: Any, config: Mapping[str, Any], path: Path) -> Family:
    """Family of the first of some architectures; `ValueError` for one that is not known."""
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    for family in FAMILIES.values():
        for name, field in family.aliases.items():
            if names == [name] and config.get(field) is not None:
                return family
    first = str(names[0]) if isinstance(names, list) and names else ""
    if first in known:
        return known[first]
    if first in LATER:
        raise ValueError(
            f"{path}: {first} is {LATER[first]}, which is not supported; drafts of the families "
            "dflash and eagle are"
        )
    raise ValueError(
        f"{path}: architectures {brief(names)} is not supported; known are "
        f"{', '.join(sorted(known))}"
    )
