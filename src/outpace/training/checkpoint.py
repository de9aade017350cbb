"""Checkpoints of a run: safetensors and JSON in a folder that is written atomically.

Data order and noise are functions of the seed and the step, so no random state is saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from outpace.training.shard import local_row_range, local_rows
from outpace.training.trackers import raise_write_errors

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE = "model.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Progress of a run."""

    step: int = 0
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Metric sums since the last line of metrics; see `TrainingReport.pending_sums`."""
    examples: int | None = None
    """Number of examples used so far; None in checkpoints without this count."""


class UnusableCheckpointError(Exception):
    """A checkpoint from which a run cannot resume, with the reason."""


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    progress: TrainingProgress,
    together: Accelerator | None = None,
) -> None:
    """Write a checkpoint atomically, and delete all but it and the one before it.

    In sharded runs, `together` is the accelerator and every process writes its own rows.
    """
    target = folder / f"step-{progress.step:08d}"
    partial = folder / f".{target.name}"
    first = together is None or together.is_main_process
    with raise_write_errors(target):
        try:
            if first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            # No process can write before the folder exists.
            if together is not None:
                together.wait_for_everyone()
            weights = {
                name: local_rows(p.detach()).cpu()
                for name, p in trainable_parameters(model).items()
            }
            digests = write_files(
                partial, {MODEL_FILE: weights, OPTIMIZER_FILE: flatten_states(optimizers)}, together
            )
            if first:
                state = {**asdict(progress), "digests": digests}
                state |= {} if together is None else {"parts": together.num_processes}
                (partial / STATE_FILE).write_text(json.dumps(state))
                shutil.rmtree(target, ignore_errors=True)
                # Until here the checkpoint before it is the newest valid one.
                os.replace(partial, target)
        finally:
            if first:
                shutil.rmtree(partial, ignore_errors=True)
        if first:
            prune_checkpoints(folder, target)


def write_files(
    folder: Path, files: Mapping[str, Mapping[str, Tensor]], together: Accelerator | None
) -> dict[str, str]:
    number, count = 0, 1
    if together is not None:
        number, count = together.process_index, together.num_processes
    mine = []
    for name, tensors in files.items():
        path = folder / part_name(name, number, count)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        mine.append([*bytes.fromhex(file_digest(path))])
    table = torch.tensor(mine, dtype=torch.uint8)
    if together is not None:
        table = together.gather(table.to(together.device))
    names = [part_name(name, each, count) for each in range(count) for name in files]
    return {name: bytes(row).hex() for name, row in zip(names, table.tolist(), strict=True)}


def part_name(name: str, number: int, count: int) -> str:
    stem, dot, kind = name.partition(".")
    return name if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}{dot}{kind}"


def prune_checkpoints(folder: Path, newest: Path) -> None:
    paths = [path for path in list_checkpoints(folder) if re.fullmatch(r"step-\d{8,}", path.name)]
    place = paths.index(newest)
    for path in (*paths[: max(place - 1, 0)], *paths[place + 1 :]):
        shutil.rmtree(path)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders of checkpoints, the newest last."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def restore_latest(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    print_line: Callable[[str], None] = print,
) -> TrainingProgress:
    """Restore the newest usable checkpoint in place, and report those skipped."""
    found = list_checkpoints(folder)
    for path in reversed(found):
        try:
            return load_checkpoint(path, model, optimizers)
        except UnusableCheckpointError as error:
            print_line(f"skipping checkpoint {path}: {error}")
    if found:
        raise ValueError(f"{folder} has no usable checkpoint; give another out, or delete that run")
    return TrainingProgress()


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer]
) -> TrainingProgress:
    progress, count = verify_checkpoint(path)
    with ExitStack() as stack:
        weights, states = (
            ShardedTensors(
                [path / part_name(name, number, count) for number in range(count)], stack
            )
            for name in (MODEL_FILE, OPTIMIZER_FILE)
        )
        mine = trainable_parameters(model)
        if weights.shapes != {name: tuple(p.shape) for name, p in mine.items()}:
            raise UnusableCheckpointError("its tensors are those of another model")
        with torch.no_grad():
            for name, parameter in mine.items():
                weights.fill_tensor(name, parameter)
        for number, optimizer in enumerate(optimizers):
            restore_optimizer(optimizer, f"{number}.", states)
    return progress


def restore_optimizer(optimizer: Optimizer, prefix: str, states: ShardedTensors) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, shape in states.shapes.items():
        if key.startswith(prefix):
            number, name = key.removeprefix(prefix).split(".", 1)
            parameter = parameters[int(number)]
            like = parameter.detach() if shape == tuple(parameter.shape) else torch.empty(shape)
            state.setdefault(int(number), {})[name] = states.fill_tensor(
                key, torch.empty_like(like)
            )
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


class ShardedTensors:
    """Tensors whose rows are stored in several files, in order."""

    def __init__(self, paths: Sequence[Path], stack: ExitStack) -> None:
        self.files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the full tensors, by name."""
        for name in self.files[0].keys():  # noqa: SIM118 - a safetensors file is not a mapping
            shapes = [tuple(file.get_slice(name).get_shape()) for file in self.files]
            rows = sum(shape[0] for shape in shapes) if shapes[0] else 0
            self.shapes[name] = (rows, *shapes[0][1:]) if shapes[0] else ()

    def fill_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Copy stored rows into the rows of a tensor that this process holds."""
        if not self.shapes[name]:
            return tensor.copy_(self.files[0].get_tensor(name))
        wanted, local, begin = local_row_range(tensor), local_rows(tensor), 0
        for file in self.files:
            piece = file.get_slice(name)
            end = begin + piece.get_shape()[0]
            low, high = max(begin, wanted.start), min(end, wanted.stop)
            if low < high:
                found = piece[low - begin : high - begin]
                local[low - wanted.start : high - wanted.start] = found
            begin = end
        return tensor


def verify_checkpoint(path: Path) -> tuple[TrainingProgress, int]:
    """Check a checkpoint's files against their digests.

    Returns:
        Its progress, and the number of parts of each file.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text())
        sums = {name: (float(total), float(over)) for name, (total, over) in state["sums"].items()}
        examples = state.get("examples")
        examples = None if examples is None else int(examples)
        progress = TrainingProgress(int(state["step"]), sums, examples)
        digests = dict(state["digests"])
        count = int(state.get("parts", 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableCheckpointError(f"{STATE_FILE} is missing or damaged") from error
    if path.name != f"step-{progress.step:08d}":
        raise UnusableCheckpointError(f"its {STATE_FILE} is of step {progress.step}")
    for name in (
        part_name(name, each, count)
        for name in (MODEL_FILE, OPTIMIZER_FILE)
        for each in range(count)
    ):
        if not (path / name).is_file() or file_digest(path / name) != digests.get(name):
            raise UnusableCheckpointError(f"{name} is missing or damaged")
    return progress, count


def flatten_states(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return this process's optimizer states as `{optimizer}.{parameter}.{name}`."""
    return {
        f"{number}.{parameter}.{name}": local_rows(tensor.detach()).cpu()
        for number, optimizer in enumerate(optimizers)
        for parameter, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }
