"""Checkpoints of a run: safetensors and JSON in a folder that appears whole or not at all.

Data order and noise are functions of the seed and the step, so no generator's state is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from outpace.training.folder import writing

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: the step that comes next.
        sums: what was counted since the last line of metrics; see `Report.pending`.
    """

    step: int = 0
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Unusable(Exception):
    """Why a run cannot go on from a checkpoint."""


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes; all others are those that it began with."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save(
    folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], progress: Progress
) -> None:
    """Write the checkpoint of a step, and drop all but the one before it."""
    target = folder / f"step-{progress.step:08d}"
    partial = folder / f".{target.name}"
    weights = {name: parameter.detach().cpu() for name, parameter in trained(model).items()}
    with writing(target):
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file(weights, partial / MODEL)
            save_file(flat(optimizers), partial / OPTIMIZER)
            (partial / STATE).write_text(json.dumps(described(partial, progress)))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        prune(folder, target)


def prune(folder: Path, newest: Path) -> None:
    """Drop all checkpoints but one and the one before it."""
    ours = [path for path in checkpoints(folder) if re.fullmatch(r"step-\d{8,}", path.name)]
    place = ours.index(newest)
    for path in (*ours[: max(place - 1, 0)], *ours[place + 1 :]):
        shutil.rmtree(path)


def described(path: Path, progress: Progress) -> dict[str, object]:
    """What a checkpoint says of itself, the digests of its files among it."""
    digests = {name: digest(path / name) for name in (MODEL, OPTIMIZER)}
    return {"step": progress.step, "sums": dict(progress.sums), "digests": digests}


def digest(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoints(folder: Path) -> list[Path]:
    """All that look like checkpoints of a run, the newest last."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def restore(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    say: Callable[[str], None] = print,
) -> Progress:
    """Restore the last checkpoint that is whole, in place; those passed over for it are named."""
    found = checkpoints(folder)
    for path in reversed(found):
        try:
            return load(path, model, optimizers)
        except Unusable as error:
            say(f"{path} is passed over: {error}")
    if found:
        raise ValueError(
            f"{folder} has no checkpoint to go on from; give another out, or delete that run"
        )
    return Progress()


def load(path: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> Progress:
    """Restore model and optimizers in place from a checkpoint; `Unusable` before any change."""
    progress = verified(path)
    weights, own = load_file(path / MODEL), trained(model)
    if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in own.items()}:
        raise Unusable("it is of another model")
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
    return progress


def verified(path: Path) -> Progress:
    """How far a checkpoint has come; `Unusable` unless its files are those that were saved."""
    try:
        state = json.loads((path / STATE).read_text())
        sums = {name: (float(total), float(over)) for name, (total, over) in state["sums"].items()}
        progress, digests = Progress(int(state["step"]), sums), dict(state["digests"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unusable(f"{STATE} is missing or damaged") from error
    if path.name != f"step-{progress.step:08d}":
        raise Unusable(f"it is of step {progress.step}")
    for name in (MODEL, OPTIMIZER):
        if not (path / name).is_file() or digest(path / name) != digests.get(name):
            raise Unusable(f"{name} is missing or damaged")
    return progress


def flat(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The state of all optimizers by number of optimizer and parameter, and name."""
    return {
        f"{number}.{parameter}.{name}": tensor.detach().cpu().contiguous()
        for number, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }
