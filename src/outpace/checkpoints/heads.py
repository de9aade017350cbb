"""Heads for multi-token prediction (MTP) in a target's own checkpoint, as drafts with a name."""

from __future__ import annotations

import os
from pathlib import Path

from outpace.checkpoints.families import FAMILIES
from outpace.errors import OptionError
from outpace.models.config import ModelConfig
from outpace.models.mtp import mtp_config

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


def head_config(target: ModelConfig, name: str | Path) -> ModelConfig:
    """Return the configuration of a target's head; raise `OptionError` if there is none."""
    try:
        return mtp_config(target)
    except ValueError as error:
        raise OptionError("draft", name, f"draft: {error}: give another draft") from error


def head_prefix(config: ModelConfig) -> str | None:
    """Return the prefix of the tensors of a head; None for other models."""
    family = FAMILIES[config.family]
    if config.mtp is None or family.mtp is None or not config.is_draft:
        return None
    return family.mtp.prefix.format(config.mtp.index)
