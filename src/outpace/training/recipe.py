"""Recipes: a TOML file per training run, the processes that run it, and a draft's vocabulary."""

from __future__ import annotations

import argparse
import json
import os
import reprlib
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from outpace.checkpoints.fingerprint import digest_weights
from outpace.checkpoints.hub import resolve_checkpoint
from outpace.field_types import check_names, read_section
from outpace.models.config import ModelConfig
from outpace.models.device import DTYPES
from outpace.models.draft import Draft
from outpace.models.transformer import Transformer
from outpace.recipes import find_recipe
from outpace.training import weights
from outpace.training.data import Data, Examples, limit_length
from outpace.training.held_out import HeldOut
from outpace.training.loop import Loop
from outpace.training.lora import LoRA
from outpace.training.objective import Objective
from outpace.training.objectives import OBJECTIVES
from outpace.training.optim import Optim
from outpace.training.run_setup import require_tokenizer
from outpace.training.trackers import lock_folder, write_atomically
from outpace.training.trainer import Trainer, exit_exception
from outpace.training.weights import cover_tokens

COUNTED_EXAMPLES = 20_000
"""Examples whose tokens are counted."""

TOKENS_FILE = "draft_tokens.json"
"""File of the covered tokens in the folder of a run, so that a resumed run has the same."""


def choose_vocabulary(draft: Draft, examples: Examples, out: Path, source: Draft | None) -> None:
    """Let the head of a new draft cover the most frequent tokens of responses."""
    path = out / TOKENS_FILE
    if path.exists():
        tokens = read_tokens(path, draft)
    else:
        covered = source.head_tokens if source is not None else None
        known = set() if covered is None else {*covered.tolist()}
        tokens = frequent_tokens(examples, draft.config, known)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(tokens) + "\n")
    cover_tokens(draft, torch.tensor(tokens), source)


def frequent_tokens(examples: Examples, draft: ModelConfig, known: Set[int]) -> list[int]:
    """Return the most frequent tokens of responses, in ascending order.

    Of tokens as frequent as others, those that the draft to start from covers, `known`, are first.
    """
    total = examples.epoch_size or COUNTED_EXAMPLES
    counts = Counter[int]()
    for number in range(min(total, COUNTED_EXAMPLES)):
        counts.update(examples[number].response)
    order = sorted(range(draft.vocab), key=lambda token: (-counts[token], token not in known))
    return sorted(order[: draft.draft_vocab])


def read_tokens(path: Path, draft: Draft) -> list[int]:
    try:
        tokens = [int(token) for token in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged; delete this run") from error
    in_range = all(0 <= token < draft.config.vocab for token in tokens)
    if not in_range or len({*tokens}) != draft.config.draft_vocab:
        raise ValueError(
            f"{path} has {len({*tokens})} tokens, but draft_vocab_size is "
            f"{draft.config.draft_vocab}; give another out, or delete that run"
        )
    return tokens


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Initial weights, configuration and tokenizer."""

    init: str | None = None
    """Folder or name of the checkpoint to start from; without it, weights are random."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of a `config.json`, or changes to fields of `init`'s; for a draft, all of it."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer; `init`'s or `target`'s by default. A path is relative to the
    working directory."""
    target: str | None = None
    """Folder or name of the frozen model that a draft is trained for."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of frozen weights: those of a target, or under an adapter."""
    quantize: Literal["native", "int8", "int4", "none"] = "native"
    """Format of a target's matrices on a CPU: `native` keeps those that its file stores in 4 to 8
    bits, `int8` and `int4` round them, and `none` has all in `dtype`. They are multiplied by the
    loops that decode. On a GPU `native` is `none`."""

    @property
    def tokenizer_source(self) -> str:
        return self.tokenizer or self.target or self.init or ""

    def __post_init__(self) -> None:
        if self.init is None and not (self.config and (self.tokenizer or self.target)):
            raise ValueError("[model] needs init, or config and one of tokenizer and target")
        if self.quantize in ("int8", "int4"):
            if self.target is None:
                raise ValueError(
                    f"[model] quantize {self.quantize} needs a target; trained weights are not "
                    "quantized"
                )
            if torch.accelerator.is_available():
                raise ValueError(
                    f"[model] quantize {self.quantize} is for targets on a CPU; remove it"
                )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training run."""

    model: ModelSection
    objective: Objective
    data: Data
    optim: Optim
    train: Loop
    adapter: LoRA | None
    held_out: HeldOut | None
    out: str

    def __post_init__(self) -> None:
        if self.model.quantize in ("int8", "int4") and self.train.shard:
            raise ValueError(
                f"[model] quantize {self.model.quantize} cannot be sharded; set [train] shard = "
                "false"
            )
        if self.model.dtype == "float32":
            return
        if self.adapter is None and self.model.target is None:
            raise ValueError(
                f"[model] dtype {self.model.dtype} needs frozen weights: a target or an adapter; "
                'trained weights stay in float32. To compute in bfloat16, set precision = "bf16"'
            )
        if self.train.precision != "bf16":
            raise ValueError(f'[model] dtype {self.model.dtype} needs [train] precision = "bf16"')

    @property
    def target_format(self) -> str | None:
        """Format in which a target's matrices are multiplied; None for that of `dtype`."""
        name = self.model.quantize
        is_plain = name == "none" or self.train.shard or torch.accelerator.is_available()
        return None if is_plain else name

    def choose_vocabulary(self, draft: Draft, target: Transformer, source: Draft | None) -> None:
        if draft.head_tokens is not None:
            data = limit_length(self.data, [draft.config, target.config])
            tokenizer = require_tokenizer(resolve_checkpoint(self.model.tokenizer_source))
            examples = Examples(data, tokenizer, self.train.seed)
            choose_vocabulary(draft, examples, Path(self.out), source)

    def build_trainer(self) -> Trainer:
        model, dtype = self.model, DTYPES[self.model.dtype]
        others = {}
        begun: Transformer | Draft
        if model.target is not None:
            others["target"] = target = weights.load_target(model.target, dtype, self.target_format)
            published = dict(model.config)
            if published.get("target_head"):
                published["target_fingerprint"] = digest_weights(model.target)
            source = weights.load_trained_draft(model.init, target) if model.init else None
            if source is not None and not published:
                begun = source
            else:
                begun = weights.build_draft(published, target, self.train.seed, source)
                self.choose_vocabulary(begun, target, source)
            weights.make_borrowed_head_dense(begun, target)
        elif model.init is None:
            begun = weights.random_model(model.config, self.train.seed)
        else:
            begun = weights.adapt_checkpoint(model.init, model.config, dtype)
        return Trainer(
            begun,
            self.objective,
            data=self.data,
            out=self.out,
            tokenizer=model.tokenizer_source,
            optim=self.optim,
            loop=self.train,
            adapter=self.adapter,
            others=others,
            source=asdict(model),
            held_out=self.held_out,
        )


SECTIONS: dict[str, type[Any]] = {
    "model": ModelSection,
    "data": Data,
    "optim": Optim,
    "train": Loop,
    "adapter": LoRA,
    "held_out": HeldOut,
}
OPTIONAL_SECTIONS = ("adapter", "held_out")
"""Sections whose absence disables the feature."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe by path or name, apply `key=value` overrides, and check all keys and values."""
    path = find_recipe(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    objective, known = table.setdefault("objective", {}), [*SECTIONS, "objective"]
    if loose := [name for name in known if not isinstance(table.get(name, {}), dict)]:
        raise ValueError(f"{path}: {loose[0]} is a section; write its keys under [{loose[0]}]")
    for override in overrides:
        apply_override(table, override)
    check_names(str(path), table, [*known, "out"])
    name = objective.pop("name", None)
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise ValueError(f"objective {name!r} is unknown; choose one of {', '.join(OBJECTIVES)}")
    built: dict[str, Any] = {
        key: None
        if key in OPTIONAL_SECTIONS and key not in table
        else read_section(f"[{key}]", kind, table.get(key, {}))
        for key, kind in SECTIONS.items()
    }
    out = table.get("out", f"runs/{path.stem}")
    if not isinstance(out, str) or not out:
        raise ValueError(f"out must be the name of a folder, got {reprlib.repr(out)}")
    return Recipe(
        **built, objective=read_section("[objective]", OBJECTIVES[name], objective), out=out
    )


def train_recipe(path: str | Path, overrides: Sequence[str] = (), processes: int = 1) -> None:
    """Train a recipe and export the model to `out`/export; an interrupted run resumes."""
    recipe = load_recipe(path, overrides)
    recipe.train.micro_batch_size(processes)
    if processes > 1:
        with lock_folder(Path(recipe.out)):  # fails here rather than in a child process
            pass
        launch_processes(path, overrides, processes)
        return
    trainer = recipe.build_trainer()
    trainer.fit()
    export = Path(recipe.out) / "export"
    trainer.export(export)
    trainer.accelerator.print(trainer.export_summary(export))
    trainer.close()


def launch_processes(path: str | Path, overrides: Sequence[str], processes: int) -> None:
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
        # Threads of several processes would oversubscribe the cores at every operation.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = elastic_launch(config, sys.executable)
    try:
        started("-m", "outpace.training.recipe", str(path), *overrides)
    except SignalException as error:
        raise exit_exception(error.sigval) from error
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise ValueError(
            f"process {rank} of {processes} exited with status {failure.exitcode}, and the others "
            "were stopped; its error is printed above. Fix it and run the same command to resume"
        ) from error


def apply_override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"{override!r} is not an override; write key=value, such as optim.lr=1e-3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text
    *sections, last = key.split(".")
    if not sections and last != "out":
        sections = find_sections(table, last)
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"{override!r}: {section} is not a section")
    table[last] = value


def find_sections(table: Mapping[str, Any], key: str) -> list[str]:
    kinds = {**SECTIONS, "objective": OBJECTIVES.get(table["objective"].get("name"), Objective)}
    found = [name for name, kind in kinds.items() if key in {f.name for f in fields(kind)}]
    if len(found) == 2 and "held_out" in found:  # other sections take precedence
        found.remove("held_out")
    if len(found) != 1:
        known = ", ".join(f"{name}.{f.name}" for name, kind in kinds.items() for f in fields(kind))
        problem = f"is ambiguous ({', '.join(found)})" if found else "is unknown"
        raise ValueError(f"{key!r} {problem}; allowed are out, objective.name, {known}")
    return found


def main() -> None:
    """Train the recipe named on the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    try:
        train_recipe(arguments.recipe, arguments.overrides, arguments.processes)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except ValueError as error:
        sys.exit(f"outpace: {error}")


if __name__ == "__main__":
    main()
