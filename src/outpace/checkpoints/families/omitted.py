"""Fields that published configurations omit, by the last part of the checkpoint's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.checkpoints.families.a2d import A2D_BLOCK, BLOCK_SIZE
from outpace.checkpoints.name import name_of

OMITTED: Mapping[str, Mapping[str, Any]] = {
    Path(name).name.lower(): {BLOCK_SIZE: 32} for name in A2D_BLOCK.checkpoints
}


def omitted_fields(folder: Path) -> Mapping[str, Any]:
    """Return the fields that the `config.json` of a published checkpoint needs and lacks."""
    return OMITTED.get(Path(name_of(folder)).name.lower(), {})
