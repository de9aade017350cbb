"""Lookup of the family that reads a `config.json`, and known drafts of published models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.checkpoints.families import FAMILIES, Family
from outpace.checkpoints.fields import shorten

KNOWN_DRAFTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "dflash": {
        "tiny-ar": ("tiny-dflash",),
        "Qwen/Qwen3-4B": ("z-lab/Qwen3-4B-DFlash-b16", "deepseek-ai/dspark_qwen3_4b_block7"),
        "Qwen/Qwen3-8B": ("z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_qwen3_8b_block7"),
        "Qwen/Qwen3-14B": ("deepseek-ai/dspark_qwen3_14b_block7",),
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("z-lab/Qwen3-Coder-30B-A3B-DFlash",),
        "Qwen/Qwen3-Coder-Next": ("z-lab/Qwen3-Coder-Next-DFlash",),
        "Qwen/Qwen3.5-4B": ("z-lab/Qwen3.5-4B-DFlash",),
        "Qwen/Qwen3.5-9B": ("z-lab/Qwen3.5-9B-DFlash",),
        "Qwen/Qwen3.5-27B": ("z-lab/Qwen3.5-27B-DFlash",),
        "Qwen/Qwen3.5-35B-A3B": ("z-lab/Qwen3.5-35B-A3B-DFlash",),
        "Qwen/Qwen3.5-122B-A10B": ("z-lab/Qwen3.5-122B-A10B-DFlash",),
        "Qwen/Qwen3.6-27B": ("z-lab/Qwen3.6-27B-DFlash",),
        "Qwen/Qwen3.6-35B-A3B": ("z-lab/Qwen3.6-35B-A3B-DFlash",),
        "Qwen/Qwen3.8-27B": ("z-lab/Qwen3.8-27B-DFlash2",),
        "meta-llama/Llama-3.1-8B-Instruct": ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",),
        "moonshotai/Kimi-K2.5": ("z-lab/Kimi-K2.5-DFlash",),
        "openai/gpt-oss-20b": ("z-lab/gpt-oss-20b-DFlash",),
        "openai/gpt-oss-120b": ("z-lab/gpt-oss-120b-DFlash",),
    },
    "eagle": {"tiny-ar": ("tiny-eagle",)},
    "speculative": {
        "tiny-ar": ("tiny-aux",),
        "Qwen/Qwen2.5-7B-Instruct": ("Qwen/Qwen2.5-0.5B-Instruct",),
        "Qwen/Qwen3-8B": ("Qwen/Qwen3-0.6B",),
        "meta-llama/Llama-3.1-8B-Instruct": ("meta-llama/Llama-3.2-1B-Instruct",),
    },
}
"""Drafts of each method by the name of their target."""


def family_of(config: Mapping[str, Any], path: Path) -> Family:
    """Return the family that reads this `config.json`.

    Raises:
        ValueError: For an unknown architecture, for several, and for custom code in the checkpoint
            that may compute something else.
    """
    names = config.get("architectures") or []
    family = match_architecture(names, config, path)
    if len(names) > 1:
        raise ValueError(
            f"{path}: architectures must name one architecture, got {shorten(names)}; "
            "keep the one of this checkpoint"
        )
    try:
        family.check_remote(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return family


def match_architecture(names: Any, config: Mapping[str, Any], path: Path) -> Family:
    known = {name: family for family in FAMILIES.values() for name in family.architectures}
    for family in FAMILIES.values():
        for name, field in family.aliases.items():
            if names == [name] and config.get(field) is not None:
                return family
    first = str(names[0]) if isinstance(names, list) and names else ""
    if first in known:
        return known[first]
    raise ValueError(
        f"{path}: architectures {shorten(names)} is not supported; known are "
        f"{', '.join(sorted(known))}"
    )
