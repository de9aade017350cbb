"""Small runs for the tests of training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers import published
from outpace.checkpoints.load import ZOO_FOLDER
from outpace.training import Trainer, weights
from outpace.training.objectives import MDLM, SFT
from outpace.training.plan import Plan, Planner
from outpace.training.recipe import Recipe

RECIPE = f"""
[model]
tokenizer = "{ZOO_FOLDER / "vocabulary"}"
config = {json.dumps(published(vocab_size=1024)).replace(": ", " = ")}
[objective]
name = "sft"
[data]
path = "story:train"
[optim]
optimizer = "muon"
lr = 1e-2
warmup = 2
decay = 0
[train]
steps = 12
batch = 4
log_every = 1
save_every = 4
"""


def trainer(out: Path, architecture: str = "Qwen2ForCausalLM", **options: Any) -> Trainer:
    """A trainer of a tiny random model on the story."""
    mask = {} if architecture.startswith("Qwen") else {"mask_token_id": 1021}
    config = published(architecture, vocab_size=1024, **mask)
    objective = MDLM(suffix=0.3, anchored=0.3) if mask else SFT()
    defaults = {
        "data": "story:train",
        "optimizer": "muon",
        "lr": 1e-2,
        "warmup": 2,
        "batch": 4,
        "save_every": 4,
    }
    return Trainer(
        weights.random_model(config, 0),
        objective,
        out=out,
        tokenizer=ZOO_FOLDER / "vocabulary",
        **{**defaults, **options},
    )


def plan_recipe(recipe: Recipe, processes: int = 1) -> Plan:
    """The plan of a recipe on this many devices."""
    return Planner(recipe).build_plan(processes)


def metrics(out: Path) -> list[dict[str, float]]:
    """The lines that a run has logged, without what the clock says."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    clock = ("rows_per_second", "tokens_per_second", "seconds")
    return [{name: line[name] for name in line if name not in clock} for line in lines]


def losses(out: Path) -> list[float]:
    """The losses that a run has logged."""
    return [line["loss"] for line in metrics(out)]


def start(path: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """Train a recipe in a process of its own."""
    command = [sys.executable, "-m", "outpace.training.recipe", str(path), f"out={out}", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)
