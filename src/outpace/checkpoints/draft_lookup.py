"""Lookup of the published drafts for a target."""

from __future__ import annotations

from pathlib import Path

from outpace.checkpoints.families.drafts import KNOWN_DRAFTS
from outpace.checkpoints.load import is_local
from outpace.errors import OptionError

AUTO_DRAFT = "auto"
"""Value of the option `draft` that selects a published draft of the target."""


def known_drafts(target: str | Path, method: str) -> tuple[str, ...]:
    """Return the published drafts of a method for a target, by the last part of its name."""
    name = Path(target).name.lower()
    targets = KNOWN_DRAFTS.get(method, {}).items()
    return tuple(
        draft for known, drafts in targets for draft in drafts if Path(known).name.lower() == name
    )


def local_draft(target: str | Path, method: str) -> str | None:
    """Return the first published draft for a target that is on this machine, if any."""
    return next(filter(is_local, known_drafts(target, method)), None)


def find_local_draft(target: str | Path, method: str) -> str:
    """Return the first published draft for a target that is on this machine, without a download.

    Raises:
        OptionError: If none is on this machine, naming the published ones.
    """
    if found := local_draft(target, method):
        return found
    if not (known := known_drafts(target, method)):
        raise OptionError(
            "draft",
            AUTO_DRAFT,
            f"draft: no published draft of {method} for {str(target)!r}: give one, or train one",
        )
    raise OptionError(
        "draft",
        AUTO_DRAFT,
        f"draft: {AUTO_DRAFT!r} downloads nothing, and no published draft of {method} for "
        f"{str(target)!r} ({', '.join(known)}) is on this machine: give draft={known[0]!r} to "
        "download it",
    )
