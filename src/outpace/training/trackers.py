"""Experiment trackers for a run's metrics, through Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from outpace.training.folder import raise_write_errors

TRACKERS = ("tensorboard", "trackio", "wandb")
PROJECT = "outpace"


def check_tracker(name: str | None) -> None:
    """Raise `ValueError` for a tracker that is unknown or not installed."""
    if name is None:
        return
    if name not in TRACKERS:
        raise ValueError(f"tracker {name!r} is unknown; choose {', '.join(TRACKERS)}")
    if name not in {str(each) for each in get_available_trackers()}:
        raise ValueError(f"tracker {name!r} is not installed: pip install {name}")


def start_tracker(
    accelerator: Accelerator, out: Path, settings: Mapping[str, Any], step: int
) -> None:
    """Start or, after a step, resume a run of the accelerator's tracker."""
    options = {
        # Points of repeated steps are dropped.
        "tensorboard": {"purge_step": step + 1},
        "wandb": {"name": out.name, "dir": str(out)},
        "trackio": {"name": out.name},
    }
    values = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flatten_settings(settings).items()
    }
    with raise_write_errors(out):
        accelerator.init_trackers(PROJECT, config=values, init_kwargs=options)


def flatten_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to values by dotted name."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= flatten_settings(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found
