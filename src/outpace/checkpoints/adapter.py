"""Low-rank adapters (LoRA, Hu et al., 2021) in PEFT's format."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outpace.checkpoints.fields import (
    Fields,
    choice,
    count,
    error_line,
    field,
    flag,
    mapping,
    number,
    read_json_object,
    read_known_fields,
    words,
)
from outpace.checkpoints.hub import resolve_checkpoint

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
DOWN_SUFFIX, UP_SUFFIX = ".lora_A.weight", ".lora_B.weight"


INITIALIZATIONS = (True, False, "eva", "gaussian", "orthogonal")
"""Supported initializations; others change the base weights."""
LORA_FIELDS: Fields = {
    "r": field("r", count),
    "lora_alpha": field("lora_alpha", number),
    "use_rslora": field("use_rslora", flag, False),
    "init_lora_weights": field("init_lora_weights", choice(INITIALIZATIONS), True),
    "model_config": field("model_config", mapping, {}),  # ours, which PEFT does not read
}
LORA_FIXED: Fields = {"bias": "none", "peft_type": "LORA"}
LORA_IGNORED = words(
    """
    auto_mapping base_model_name_or_path eva_config exclude_modules inference_mode
    layers_pattern layers_to_transform lora_dropout megatron_config megatron_core peft_version
    qalora_group_size revision runtime_config target_modules task_type
    """
)
"""Fields about training; which modules are adapted follows from the tensors."""
LORA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LORA_REMEDY = "supported: low-rank updates of matrices only"


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update `scale * up @ down` of a matrix."""

    down: Tensor
    """`[rank, in]`."""
    up: Tensor
    """`[out, rank]`."""
    scale: float
    """`alpha / rank`, or `alpha / sqrt(rank)` with `use_rslora`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the updated matrix."""
        return self.up.shape[0], self.down.shape[1]

    def compute_delta(self) -> Tensor:
        return self.scale * (self.up.float() @ self.down.float())


@dataclass(eq=False)
class Adapter:
    """Updates of a model's matrices; its files are read when first used."""

    name: str | Path
    """A folder, or a name of the hub."""

    @cached_property
    def folder(self) -> Path:
        """Folder of the configuration."""
        return resolve_checkpoint(self.name, (ADAPTER_CONFIG,), param="adapter")

    @cached_property
    def config(self) -> Fields:
        return read_lora_config(self.folder)

    @property
    def changes(self) -> Fields:
        """Fields of the model's `config.json` that it was trained with."""
        changes: Fields = self.config["model_config"]
        return changes

    @cached_property
    def updates(self) -> Mapping[str, LowRank]:
        """Updates by the published name of their weight."""
        return self.read_updates()

    def read_updates(self) -> Mapping[str, LowRank]:
        config, folder = self.config, resolve_checkpoint(self.name, param="adapter")
        path = folder / ADAPTER_WEIGHTS
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{path} is not a readable safetensors file: {error_line(error)}"
            ) from error
        if not tensors:
            raise ValueError(f"{path} has no tensors")
        return dict(pair_matrices(tensors, config, path))

    def check_names(self, names: Collection[str]) -> None:
        """Raise `ValueError` for an update of a weight that the model does not have."""
        if unknown := sorted(set(self.updates) - set(names)):
            raise ValueError(
                f"{self.folder}: the model has no {unknown[0]!r} to adapt ({len(unknown)} of "
                f"{len(self.updates)} updates are unknown); was it trained on another model?"
            )

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` for a weight of another shape than its update."""
        if (found := self.updates[name].shape) != shape:
            raise ValueError(
                f"{self.folder}: the update of {name!r} has shape {found}, but the weight "
                f"{shape}; the adapter was trained on another model"
            )

    def merge_weight(self, name: str, weight: Tensor) -> Tensor:
        """Return a published weight with its update added, if it has one."""
        if name not in self.updates:
            return weight
        self.check_shape(name, tuple(weight.shape))
        return weight.float() + self.updates[name].compute_delta()


def read_lora_config(folder: Path) -> Fields:
    """Read the configuration of an adapter; raise `ValueError` for an unsupported one."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ValueError(f"{path} does not exist: an adapter folder needs it")
    try:
        config = read_json_object(path)
        if config.get("peft_type") != "LORA":
            raise ValueError(f"peft_type must be 'LORA', got {config.get('peft_type')!r}")
        return read_known_fields(
            LORA_FIELDS, config, fixed=LORA_FIXED, ignored=LORA_IGNORED, remedy=LORA_REMEDY
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def pair_matrices(
    tensors: Mapping[str, Tensor], config: Fields, path: Path
) -> Iterator[tuple[str, LowRank]]:
    """Yield the update of each weight with its published name."""
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    for name in sorted(tensors):
        if not name.startswith(PEFT_PREFIX) or not name.endswith((DOWN_SUFFIX, UP_SUFFIX)):
            raise ValueError(f"{path}: tensor {name!r} does not belong to a low-rank adapter")
        module = name.removeprefix(PEFT_PREFIX).removesuffix(DOWN_SUFFIX).removesuffix(UP_SUFFIX)
        try:
            down, up = (
                tensors[f"{PEFT_PREFIX}{module}{half}"] for half in (DOWN_SUFFIX, UP_SUFFIX)
            )
        except KeyError as error:
            raise ValueError(f"{path}: {name!r} has no partner {error}") from None
        if tensors[name].dtype not in LORA_DTYPES or not bool(tensors[name].isfinite().all()):
            raise ValueError(
                f"{path}: tensor {name!r} must have finite values in float32, bfloat16 or float16"
            )
        if down.dim() != 2 or up.dim() != 2 or (down.shape[0], up.shape[1]) != (rank, rank):
            raise ValueError(
                f"{path}: {module} has matrices {tuple(down.shape)} and {tuple(up.shape)}, but "
                f"{ADAPTER_CONFIG} requires rank {rank}"
            )
        yield f"{module}.weight", LowRank(down, up, scale)


def save_adapter(
    folder: str | Path, updates: Mapping[str, LowRank], config: Mapping[str, Any]
) -> None:
    """Write updates as a PEFT folder; `config` becomes its `adapter_config.json`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, update in updates.items():
        module = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
        tensors[f"{module}{DOWN_SUFFIX}"] = update.down.detach().cpu().contiguous()
        tensors[f"{module}{UP_SUFFIX}"] = update.up.detach().cpu().contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def model_title(model: str | Path, adapter: str | Path | None) -> str:
    """Return the name of a model, followed by that of its adapter."""
    return str(model) if adapter is None else f"{model} + {adapter}"
