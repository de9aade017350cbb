"""Recipes: one TOML file a trained checkpoint, and the processes that train it."""

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from outpace.models.draft import FeatureDraft
from outpace.models.load import load_model
from outpace.models.transformer import Transformer
from outpace.training import checkpoint
from outpace.training.data import Data
from outpace.training.lora import LoRA
from outpace.training.objective import Objective
from outpace.training.objectives import OBJECTIVES
from outpace.training.optim import Optim
from outpace.training.trainer import Loop, Trainer


@dataclass(frozen=True, kw_only=True)
class Model:
    """Where the weights begin.

    Attributes:
        init: Folder or name of the checkpoint to start from; without it, weights are random.
        config: Content of a `config.json`, or the fields of init's to change.
        tokenizer: Folder or name of the tokenizer; init's or target's by default. A path starts
            at the working directory.
        target: Folder or name of the model that a draft is made for, which only looks on.
    """

    init: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if self.init is None and not (self.config and (self.tokenizer or self.target)):
            raise ValueError("[model] needs init, or config and one of tokenizer and target")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides a run."""

    model: Model
    objective: Objective
    data: Data
    optim: Optim
    train: Loop
    adapter: LoRA | None
    out: str

    def trainer(self) -> Trainer:
        """The trainer of this recipe."""
        model = self.model
        others = {} if model.target is None else {"target": load_model(model.target)}
        weights: Transformer | FeatureDraft
        if others:
            weights = checkpoint.draft(model.init, model.config, others["target"], self.train.seed)
        elif model.init is None:
            weights = checkpoint.fresh(model.config, self.train.seed)
        else:
            weights = checkpoint.adapted(model.init, model.config)
        return Trainer(
            weights,
            self.objective,
            data=self.data,
            out=self.out,
            tokenizer=model.tokenizer or model.target or model.init,
            optim=self.optim,
            loop=self.train,
            adapter=self.adapter,
            others=others,
            source=asdict(model),
        )


SECTIONS: dict[str, type[Any]] = {
    "model": Model,
    "data": Data,
    "optim": Optim,
    "train": Loop,
    "adapter": LoRA,
}


def read(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, change what the overrides `key=value` say, and check every key."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no recipe at {str(path)!r}; give the path of a TOML file")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    objective = table.setdefault("objective", {})
    for override in overrides:
        _override(table, override)
    _known(str(path), table, [*SECTIONS, "objective", "out"])
    name = objective.pop("name", None)
    if name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is unknown; known are {', '.join(OBJECTIVES)}")
    built = {key: _section(key, kind, table.get(key, {})) for key, kind in SECTIONS.items()}
    if "adapter" not in table:
        built["adapter"] = None
    return Recipe(
        **built,
        objective=_section("objective", OBJECTIVES[name], objective),
        out=str(table.get("out", f"runs/{path.stem}")),
    )


def train(path: str | Path, overrides: Sequence[str] = (), processes: int = 1) -> None:
    """Train a recipe to its end and export it to `out`/export; a stopped run goes on."""
    if processes < 1:
        raise ValueError(f"processes must be at least 1, not {processes}")
    recipe = read(path, overrides)
    recipe.train.share(processes)
    if processes > 1:
        _launch(path, overrides, processes)
        return
    trainer = recipe.trainer()
    trainer.fit()
    trainer.export(Path(recipe.out) / "export")
    trainer.close()


def _launch(path: str | Path, overrides: Sequence[str], processes: int) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=Path(path).stem,
        local_addr="localhost",
        max_restarts=0,
    )
    if not torch.accelerator.is_available():
        # Threads of several processes would wait for one another at every operation.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    launch = elastic_launch(config, sys.executable)
    launch("-m", "outpace.training.recipe", str(path), *overrides)


def _section(name: str, kind: type[Any], table: Mapping[str, Any]) -> Any:
    _known(f"[{name}]", table, [f.name for f in fields(kind)])
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"[{name}]: {error}") from error


def _known(where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(known)}")


def _override(table: dict[str, Any], override: str) -> None:
    """Set one dotted key; a bare one is looked up in the sections."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"{override!r} is no override; write key=value, such as optim.lr=1e-3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.split(".")
    if not sections and last != "out":
        sections = _owners(table, last)
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"{override!r}: {section} is no section")
    table[last] = value


def _owners(table: Mapping[str, Any], key: str) -> list[str]:
    kinds = {**SECTIONS, "objective": OBJECTIVES.get(table["objective"].get("name"), Objective)}
    owners = [name for name, kind in kinds.items() if key in {f.name for f in fields(kind)}]
    if len(owners) != 1:
        known = ", ".join(f"{name}.{f.name}" for name, kind in kinds.items() for f in fields(kind))
        problem = f"is ambiguous ({', '.join(owners)})" if owners else "is unknown"
        raise ValueError(f"{key!r} {problem}; known are out, objective.name, {known}")
    return owners


def main() -> None:
    """Train the recipe named on the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    train(arguments.recipe, arguments.overrides, arguments.processes)


if __name__ == "__main__":
    main()
