"""Low-rank adapters (LoRA, Hu et al., 2021) in the folders that PEFT writes, by published names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
OTHERWISE = ("use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "layer_replication")
"""Fields that make an update something else than the product of two matrices."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update `scale * up @ down` of a matrix.

    Attributes:
        down: `[rank, in]`.
        up: `[out, rank]`.
        scale: alpha / rank, or alpha / sqrt(rank) where the adapter says so.
    """

    down: Tensor
    up: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix that it updates."""
        return self.up.shape[0], self.down.shape[1]

    def delta(self) -> Tensor:
        """The update, `f32[out, in]`."""
        return self.scale * (self.up.float() @ self.down.float())


@dataclass(frozen=True, slots=True)
class Adapter:
    """Updates of a model's matrices.

    Attributes:
        folder: Where they were read.
        updates: Published name of a weight to its update.
    """

    folder: Path
    updates: Mapping[str, LowRank]

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> Adapter:
        """Read a folder with the content of its `adapter_config.json`; unknown keys are ignored.

        Raises `ValueError` for another kind of adapter, an unknown tensor, half a pair, or a rank
        that is not the configured one.
        """
        if config.get("peft_type") != "LORA":
            raise ValueError(f"{folder / CONFIG}: peft_type {config.get('peft_type')!r} is no LORA")
        if found := [name for name in OTHERWISE if config.get(name)]:
            raise ValueError(f"{folder / CONFIG}: {', '.join(found)} is not supported")
        path = folder / WEIGHTS
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        updates = {}
        for name in sorted(tensors):
            if not name.startswith(PREFIX) or not name.endswith((DOWN, UP)):
                raise ValueError(f"{path}: tensor {name!r} is none of a low-rank adapter")
            module = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
            try:
                down, up = (tensors[f"{PREFIX}{module}{half}"] for half in (DOWN, UP))
            except KeyError as error:
                raise ValueError(f"{path}: {name!r} has no partner {error}") from None
            rank, scale = scaled(config, module)
            if (down.shape[0], up.shape[1]) != (rank, rank):
                raise ValueError(
                    f"{path}: {module} has matrices {tuple(down.shape)} and {tuple(up.shape)}, but "
                    f"{CONFIG} means rank {rank}"
                )
            updates[f"{module}.weight"] = LowRank(down, up, scale)
        return cls(folder, updates)

    def check(self, names: Collection[str]) -> None:
        """Raise `ValueError` for an update of a weight that the model does not have."""
        if unknown := sorted(set(self.updates) - set(names)):
            raise ValueError(
                f"{self.folder}: the model has no {unknown[0]!r} to adapt ({len(unknown)} of "
                f"{len(self.updates)} updates are unknown); was the adapter trained on another?"
            )

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """A published weight with its update, if there is one."""
        if name not in self.updates:
            return weight
        update = self.updates[name]
        if update.shape != tuple(weight.shape):
            raise ValueError(
                f"{self.folder}: the update of {name!r} has shape {update.shape}, but the weight "
                f"{tuple(weight.shape)}; the adapter was trained on another model"
            )
        return weight.float() + update.delta()


def scaled(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Rank and scale of a module, as PEFT reads them."""
    rank = patterned(config.get("rank_pattern"), module, config["r"])
    alpha = patterned(config.get("alpha_pattern"), module, config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def patterned(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Value of the first pattern that the end of a module's name matches."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def save_adapter(
    folder: str | Path, updates: Mapping[str, LowRank], config: Mapping[str, Any]
) -> None:
    """Write updates as a PEFT folder; `config` is what stands in its `adapter_config.json`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, update in updates.items():
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        tensors[f"{module}{DOWN}"] = update.down.detach().cpu().contiguous()
        tensors[f"{module}{UP}"] = update.up.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
