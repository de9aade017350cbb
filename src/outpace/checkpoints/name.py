"""Names of models for people: of a file or folder, never the path to it."""

from __future__ import annotations

import os
from collections.abc import Container
from itertools import count
from pathlib import Path

GGUF = ".gguf"
HUB = "models--"
"""What a folder of the hub's cache begins with; the rest is the owner and the name."""


def name_of(model: str | Path) -> str:
    """Return the name of a model: the last part of a path, without `.gguf`.

    A snapshot in the hub's cache has the name of its repository. Names of the hub and of the zoo
    are returned unchanged.
    """
    if not (os.path.isabs(model) or os.path.exists(model)):
        return str(model)
    path = Path(os.path.abspath(model))
    if path.parent.name == "snapshots" and path.parents[1].name.startswith(HUB):
        return path.parents[1].name.removeprefix(HUB).replace("--", "/", 1)
    name = path.stem if path.suffix.lower() == GGUF and not path.is_dir() else path.name
    return "".join(each if each.isprintable() else "_" for each in name) or "model"


def distinct_name(name: str, taken: Container[str]) -> str:
    """Return a name that is not taken: with a number from 2 on where it is."""
    numbered = (f"{name}-{number}" for number in count(2))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def short_title(title: str) -> str:
    """Return the title of a model and its adapter with names in place of absolute paths."""
    parts = title.split(" + ")
    return " + ".join(name_of(part) if os.path.isabs(part) else part for part in parts)
