"""Where else the log of a run goes: experiment trackers, through Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from outpace.training.folder import writing

TRACKERS = ("tensorboard", "trackio", "wandb")
PROJECT = "outpace"


def check(name: str | None) -> None:
    """Raise `ValueError` for a tracker that is unknown or not installed."""
    if name is None:
        return
    if name not in TRACKERS:
        raise ValueError(f"tracker {name!r} is unknown; choose {', '.join(TRACKERS)}")
    if name not in {str(known) for known in get_available_trackers()}:
        raise ValueError(f"tracker {name!r} is not installed: pip install {name}")


def begin(accelerator: Accelerator, out: Path, settings: Mapping[str, Any], step: int) -> None:
    """Begin a run of the accelerator's tracker, or go on with one after a step."""
    options = {
        # Points of steps that are done again are not shown.
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": out.name, "dir": str(out)},
        "trackio": {"name": out.name},
    }
    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in leaves(settings).items()
    }
    with writing(out):
        accelerator.init_trackers(PROJECT, config=values, init_kwargs=options)


def leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What stands in nested tables, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= leaves(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found
