"""Old names of public attributes, which one release accepts with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def accept_old_attributes(cls: type, names: Mapping[str, str]) -> None:
    """Let instances of a class have attributes and methods under their old names too.

    Args:
        cls: class that has the attributes.
        names: current name of each old name.
    """
    for old, new in names.items():
        setattr(cls, old, Renamed(old, new))


@dataclass(frozen=True)
class Renamed:
    """Descriptor of an attribute, method or class method under its old name."""

    old: str
    new: str

    def __get__(self, instance: object, owner: type) -> Any:
        warn_renamed(owner, self.old, self.new)
        return getattr(owner if instance is None else instance, self.new)


def accept_old_overrides(cls: type, names: Mapping[str, str]) -> None:
    """Let a subclass override attributes and methods of its base under their old names too.

    A dataclass field of such a name is an option of the subclass and no override.
    """
    for old, new in names.items():
        is_option = "ClassVar" not in str(cls.__annotations__.get(old, "ClassVar"))
        if old in vars(cls) and new not in vars(cls) and not is_option:
            warn_renamed(cls, old, new, stacklevel=4)
            setattr(cls, new, vars(cls)[old])


def warn_renamed(cls: type, old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn the code that uses an old name."""
    message = f"{cls.__name__}.{old} is now {cls.__name__}.{new}; the old name will be removed"
    warnings.warn(message, FutureWarning, stacklevel=stacklevel)
