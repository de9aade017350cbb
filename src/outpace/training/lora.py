"""Training of low-rank updates (LoRA, Hu et al., 2021) of a frozen model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outpace.checkpoints.adapter import Adapter, LowRank
from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.families.family import part_sizes
from outpace.field_types import Bounds, PositiveFloat, check_fields
from outpace.models.transformer import Stack

MAX_RANK = 2**16
"""Upper bound of `LoRA.rank`."""


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapted matrices, and the rank and scale of their updates."""

    rank: Annotated[int, Bounds(1, MAX_RANK)] = 32
    alpha: PositiveFloat = 32.0
    """An update is scaled by alpha / rank."""
    dropout: Annotated[float, Bounds(0, 1, below=True)] = 0.0
    """Fraction of an update's inputs that are dropped in training."""
    targets: tuple[str, ...] = ()
    """Published names of matrices, such as `q_proj`; all attention matrices by default."""
    init: str | None = None
    """Folder or hub name of an adapter to train further, of the same rank and matrices."""

    def __post_init__(self) -> None:
        check_fields(self)

    def adapts_weight(self, path: str, published: str) -> bool:
        return matrix_name(published) in self.targets if self.targets else ".attention." in path

    def adapter_config(self, model: Stack, origin: Mapping[str, Any]) -> Mapping[str, object]:
        """Return the content of an `adapter_config.json`.

        `origin` has the base model as `init`, and changes to its `config.json` as `config`.
        """
        return {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": origin.get("init"),
            **({"model_config": changes} if (changes := origin.get("config")) else {}),
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": sorted({matrix_name(name) for name in collect_updates(model)}),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


class LowRankUpdate(nn.Module):
    """A low-rank update of one published matrix, initially zero."""

    def __init__(self, published: str, size: tuple[int, int], lora: LoRA) -> None:
        super().__init__()
        self.published, self.scale = published, lora.alpha / lora.rank
        self.down = nn.Parameter(torch.empty(lora.rank, size[1]))
        self.up = nn.Parameter(torch.zeros(size[0], lora.rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))


class AdaptedLinear(nn.Module):
    """A frozen linear layer, with updates of the published matrices that are fused in it."""

    def __init__(
        self, path: str, linear: nn.Linear, parts: Sequence[tuple[str, int]], lora: LoRA
    ) -> None:
        super().__init__()
        self.linear, self.dropout = linear, nn.Dropout(lora.dropout)
        self.sizes = [size for _, size in parts]
        self.updates = nn.ModuleDict(
            {
                str(number): LowRankUpdate(published, (size, linear.in_features), lora)
                for number, (published, size) in enumerate(parts)
                if lora.adapts_weight(path, published)
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        # Together the updates are one of the fused matrix, which needs fewer passes over its rows.
        down, up = list[Tensor](), list[Tensor]()
        for number, size in enumerate(self.sizes):
            if (key := str(number)) in self.updates:
                update = self.updates[key]
                assert isinstance(update, LowRankUpdate)
                down.append(update.down)
                up.append(update.up * update.scale)
            else:
                up.append(x.new_zeros(size, 0))
        inner = F.linear(self.dropout(x), torch.cat(down))
        added: Tensor = self.linear(x) + F.linear(inner, torch.block_diag(*up))
        return added


def attach_adapter(model: Stack, lora: LoRA, seed: int = 0) -> Stack:
    """Freeze a model and attach updates to the matrices chosen by `lora`, in place."""
    model.requires_grad_(False)
    family = FAMILIES[model.config.family]
    linears = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear)]
    known = {
        name
        for path, _ in linears
        for name in map(matrix_name, family.tensor_names(f"{path}.weight"))
    }
    if unknown := sorted(set(lora.targets) - known):
        raise ValueError(
            f"targets {', '.join(unknown)} are not in the model; it has {', '.join(sorted(known))}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for path, linear in linears:
            parts = matrix_parts(model, path, linear)
            if any(lora.adapts_weight(path, published) for published, _ in parts):
                model.set_submodule(path, AdaptedLinear(path, linear, parts, lora))
    return model


@torch.no_grad()
def restore_updates(model: Stack, init: str) -> None:
    """Set a model's updates to those of the adapter `init`; `ValueError` if they do not fit."""
    known = Adapter(init)
    own = {u.published: u for u in model.modules() if isinstance(u, LowRankUpdate)}
    if other := sorted(own.keys() ^ known.updates.keys()):
        raise ValueError(
            f"[adapter] init {init} updates other matrices, such as {other[0]!r}; set targets to "
            f"{', '.join(sorted(set(map(matrix_name, known.updates))))}"
        )
    for name, update in own.items():
        known.check_shape(name, (update.up.shape[0], update.down.shape[1]))
        found = known.updates[name]
        if len(found.down) != len(update.down):
            raise ValueError(
                f"[adapter] init {init} has rank {len(found.down)}; set rank to it, not to "
                f"{len(update.down)}"
            )
        update.down.copy_(found.down)
        update.up.copy_(found.up * (found.scale / update.scale))


def matrix_parts(model: Stack, path: str, linear: nn.Linear) -> list[tuple[str, int]]:
    names = FAMILIES[model.config.family].tensor_names(f"{path}.weight")
    whole = (linear.out_features,)
    sizes = part_sizes(model.config, f"{path}.weight") if len(names) > 1 else whole
    return list(zip(names, sizes, strict=True))


def matrix_name(published: str) -> str:
    return published.removesuffix(".weight").rpartition(".")[2]


def collect_updates(
    model: nn.Module, given: Mapping[str, Tensor] | None = None
) -> dict[str, LowRank]:
    """Return a model's updates by the published name of their weight.

    `given` are its trained parameters, gathered, if those of the model are sharded.
    """
    own = given or dict(model.named_parameters())
    return {
        update.published: LowRank(own[f"{path}.down"], own[f"{path}.up"], update.scale)
        for path, update in model.named_modules()
        if isinstance(update, LowRankUpdate)
    }
