"""Drafts that are known for a target, and those of them that are on this machine."""

from __future__ import annotations

from pathlib import Path

from outpace.checkpoints.families.drafts import DRAFTS
from outpace.checkpoints.load import here
from outpace.errors import OptionError

AUTO = "auto"
"""What stands for the draft that is known for a target."""


def drafts_for(target: str | Path, method: str) -> tuple[str, ...]:
    """Drafts of a method that are known for a target, by its name or that of its folder."""
    name = Path(target).name.lower()
    named = DRAFTS.get(method, {}).items()
    return tuple(
        draft for known, drafts in named for draft in drafts if Path(known).name.lower() == name
    )


def draft_for(target: str | Path, method: str) -> str:
    """The first draft that is known for a target and is on this machine; nothing is downloaded.

    Raises `ValueError` naming those that are known where none is here.
    """
    known = drafts_for(target, method)
    if found := next(filter(here, known), None):
        return found
    if not known:
        raise OptionError(
            "draft",
            AUTO,
            f"draft: no draft for {str(target)!r} is known to {method}: name one, or train one",
        )
    raise OptionError(
        "draft",
        AUTO,
        f"draft: {method} knows {', '.join(known)} for {str(target)!r}, but none of them is on "
        f"this machine, and {AUTO!r} downloads nothing: give draft={known[0]!r} to download it",
    )
