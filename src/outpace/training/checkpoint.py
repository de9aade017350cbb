"""Checkpoints of a run: safetensors and JSON in a folder that appears whole or not at all.

Data order and noise are functions of the seed and the step, so no generator's state is kept.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from outpace.models.config import DraftConfig
from outpace.models.draft import FeatureDraft
from outpace.models.families import FAMILIES
from outpace.models.load import (
    family_of,
    load_draft,
    load_model,
    resolve,
    translate,
)
from outpace.models.rope import rotate
from outpace.models.transformer import Transformer

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


def fresh(config: Mapping[str, Any], seed: int) -> Transformer:
    """A model with random weights from the content of a `config.json`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(translate(config))


def adapted(init: str, changes: Mapping[str, Any]) -> Transformer:
    """The weights of a checkpoint under its `config.json` with some fields changed.

    For a family that spells its configuration otherwise, the changes are a whole `config.json`.
    Where the shift goes, queries are turned to look from the slot before their own.
    """
    source = load_model(init)
    if not changes:
        return source
    published, path = {**source.config.source, **changes}, resolve(init) / "config.json"
    if family_of(published, path).names is not FAMILIES[source.config.family].names:
        published = dict(changes)
    model = Transformer(translate(published, path))
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights = dict(source.named_parameters())
    if sizes != {name: parameter.shape for name, parameter in weights.items()}:
        raise ValueError(
            f"the changes {dict(changes)} give {init!r} other tensors than it has weights for; "
            "change only fields that keep their shapes"
        )
    model.load_state_dict(weights)
    if model.config.shift < source.config.shift:
        look_left(model)
    return model


@torch.no_grad()
def look_left(model: Transformer) -> None:
    """Turn the queries of all layers back by one position.

    Under a shift the row before a slot predicts it, and has learnt at what distance to look. The
    slot's own row, which predicts it without a shift, now looks at the same slots.
    """
    config = model.config
    cos, sin = model.cos[1], -model.sin[1]
    for name, parameter in model.named_parameters():
        if ".qkv." in name:
            heads = parameter[: config.heads * config.head_dim].unflatten(0, (config.heads, -1))
            heads.copy_(rotate(heads.movedim(1, -1), cos, sin).movedim(-1, 1))


def draft(
    init: str | None, config: Mapping[str, Any], target: Transformer, seed: int
) -> FeatureDraft:
    """A draft for a target: that of a checkpoint, or one with random weights."""
    if init is not None:
        if config:
            raise ValueError("a draft is trained on as it is; give [model] init or config")
        return load_draft(init, target)
    published = translate(config)
    if not isinstance(published, DraftConfig):
        raise ValueError(
            f"[model] has a target, but {published.architecture} is no draft that reads features"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FeatureDraft(published, target)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes; all others are those that it began with."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], step: int) -> None:
    """Write the checkpoint of a step, and drop all but the one before it."""
    target = folder / f"step-{step:08d}"
    partial = folder / f".{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {name: parameter.detach().cpu() for name, parameter in trained(model).items()}
    save_file(weights, partial / MODEL)
    save_file(_flat(optimizers), partial / OPTIMIZER)
    (partial / STATE).write_text(json.dumps({"step": step}))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    for old in sorted(folder.glob("step-*"))[:-2]:
        shutil.rmtree(old)


def newest(folder: Path) -> Path | None:
    """The last whole checkpoint of a run."""
    return max(folder.glob("step-*"), default=None)


def load(path: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Restore model and optimizers in place; the step that comes next."""
    weights = load_file(path / MODEL)
    own = trained(model)
    if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in own.items()}:
        raise ValueError(f"{path} is of another model; give another out, or delete that run")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    tensors = load_file(path / OPTIMIZER)
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            which, parameter_number, name = key.split(".", 2)
            if int(which) == number:
                state.setdefault(int(parameter_number), {})[name] = tensor
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    return int(json.loads((path / STATE).read_text())["step"])


def _flat(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    return {
        f"{number}.{parameter}.{name}": tensor.detach().cpu().contiguous()
        for number, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }
