"""Names of models: for display, and of a head in a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Container
from itertools import count
from pathlib import Path

GGUF_SUFFIX = ".gguf"
PART_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
"""Number of a GGUF file among the parts of a model, before `.gguf`."""

HUB_CACHE_PREFIX = "models--"
"""Prefix of a folder in the hub's cache, followed by owner and name."""


HEAD_SUFFIX = "#mtp"
"""End of the name of a checkpoint's head, after the name of the checkpoint."""


def head_name(target: str | Path) -> str:
    """Return the name of the head in a target's checkpoint."""
    return f"{target}{HEAD_SUFFIX}"


def split_head_name(name: str | Path) -> tuple[str | Path, bool]:
    """Return the checkpoint that a name stands for, and whether its head is meant."""
    if not str(name).endswith(HEAD_SUFFIX) or os.path.exists(name):
        return name, False
    return str(name).removesuffix(HEAD_SUFFIX), True


def is_gguf(path: Path) -> bool:
    return path.suffix == GGUF_SUFFIX and not path.is_dir()


def name_of(model: str | Path) -> str:
    """Return the name of a model: the last part of a path, without `.gguf` and a part's number.

    A snapshot in the hub's cache has its repository's name. Names of the hub and of the zoo are
    returned unchanged.
    """
    if not (os.path.isabs(model) or os.path.exists(model)):
        return str(model)
    path = Path(os.path.abspath(model))
    if path.parent.name == "snapshots" and path.parents[1].name.startswith(HUB_CACHE_PREFIX):
        return path.parents[1].name.removeprefix(HUB_CACHE_PREFIX).replace("--", "/", 1)
    name = path.name
    if path.suffix.lower() == GGUF_SUFFIX and not path.is_dir():
        name = PART_SUFFIX.sub("", path.stem)
    return "".join(each if each.isprintable() else "_" for each in name) or "model"


def distinct_name(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken, with a number from 2 on if necessary."""
    numbered = (f"{name}-{number}" for number in count(2))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def short_title(title: str) -> str:
    """Return the title of a model and its adapter with names instead of absolute paths."""
    parts = title.split(" + ")
    return " + ".join(name_of(part) if os.path.isabs(part) else part for part in parts)
