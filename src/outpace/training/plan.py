"""What a recipe will need, before anything is trained: sizes, steps, memory, work.

Sizes are counted, on models without memory; lengths are those of the first examples; activations
and hours are estimates, by the formulas below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from numpy.random import default_rng
from torch import nn
from torch.optim import Muon

from outpace.models.config import ModelConfig
from outpace.models.extending import draft_of
from outpace.models.load import CONFIG, load_config, resolve, translate
from outpace.models.transformer import Stack, Transformer
from outpace.training import lora, weights
from outpace.training.data import Examples
from outpace.training.objective import Objective
from outpace.training.recipe import Recipe
from outpace.training.report import duration
from outpace.training.rows import UNSCORED, Rows
from outpace.training.trainer import cut_data, tokenizer_of

LIGHT = ("*.json", "*.txt", "*.jinja")
"""Files of a hub repository without its weights."""

LOOKED_AT = 64
"""Examples whose lengths are measured, or a portion where that has more."""

FLOPS = 40e12
"""Operations per second that time is counted with: bfloat16 on a GPU of 24 GB, about a third of
what its maker states."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will need.

    Attributes:
        trained, parameters: numbers of the model; of the others that look on: `others`.
        lines: of an epoch; None where data is made without end.
        example: mean tokens of an example.
        rows: mean rows fed in a step, over all devices.
        weights, gradients, optimizer, activations: bytes of a device.
        checkpoint: bytes of one.
        work: operations of a step.
    """

    model: str
    steps: int
    batch: int
    processes: int
    trained: int
    parameters: int
    others: int
    lines: int | None
    example: float
    rows: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    checkpoint: float
    work: float

    @property
    def memory(self) -> float:
        """Bytes of a device, in all."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def seconds(self) -> float:
        """Of the whole run, with devices that are as fast as `FLOPS` says."""
        return self.steps * self.work / FLOPS / self.processes

    def described(self) -> Iterator[tuple[str, str]]:
        """Headings and what stands behind them."""
        looking = f", and {count(self.others)} that only look on" if self.others else ""
        yield "model", self.model
        yield "parameters", f"{count(self.trained)} trained of {count(self.parameters)}{looking}"
        many = "made without end" if self.lines is None else f"{self.lines:,} examples in an epoch"
        yield "data", f"{many}; {self.example:,.0f} tokens in one, of those looked at"
        tokens = self.batch * self.example
        yield "step", f"{self.batch} examples, {tokens:,.0f} tokens, {self.rows:,.0f} rows fed"
        yield (
            "steps",
            f"{self.steps:,}"
            + (f"; an epoch is {self.lines / self.batch:,.1f}" if self.lines else ""),
        )
        yield (
            "memory",
            (
                f"{gib(self.memory)} per device: weights {gib(self.weights)}, gradients "
                f"{gib(self.gradients)}, optimizer {gib(self.optimizer)}, activations about "
                f"{gib(self.activations)}"
            ),
        )
        yield "disk", f"{gib(2 * self.checkpoint)} for two checkpoints"
        yield (
            "time",
            (f"about {duration(self.seconds)} at {FLOPS / 1e12:.0f} TFLOP per second and device"),
        )


def count(parameters: int) -> str:
    """A number of parameters in millions."""
    return f"{parameters / 1e6:,.2f}M"


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:,.2f} GiB"


def plan(recipe: Recipe, processes: int = 1) -> Plan:
    """What a recipe needs; loads configurations, tokenizer and data, and no weights."""
    model, others = modelled(recipe)
    known = (model, *others)
    tokenizer = tokenizer_of(light(recipe.model.spoken))
    data = cut_data(recipe.data, [each.config for each in known])
    examples = Examples(data, tokenizer, recipe.train.seed)
    examples.check()
    objective = recipe.objective.bind(model.config)
    share = recipe.train.share(processes)
    looked = max(LOOKED_AT // share, 1) * share
    portions = sampled(objective, examples, looked, share, recipe.train.seed)
    largest = max(portions, key=len)
    learnt = total(p for p in model.parameters() if p.requires_grad)
    whole = total(model.parameters())
    if objective.taught:
        others = [*others, model]
    looking = sum(total(each.parameters()) for each in others)
    states = moments(recipe, model)
    rows = sum(map(len, portions)) / looked * recipe.train.batch
    kept = 0 if recipe.adapter and objective.taught else looking
    single = {"float32": 4, "bfloat16": 2}[recipe.model.dtype]
    # Forward once or twice; backward for the inputs, and for the weights where they are trained.
    passes = 2 + recipe.train.recompute + (recipe.adapter is None)
    inner = total(p for name, p in model.named_parameters() if "embedding" not in name)
    head = sum(part.scored for part in portions) / sum(map(len, portions)) * head_size(model)
    example = sum(len(examples[n]) for n in range(looked)) / looked
    # A target reads the example once, a teacher all rows that are learnt.
    read = example * recipe.train.batch if recipe.model.target else rows
    return Plan(
        model=f"{recipe.model.init or recipe.model.target or 'fresh'} as "
        f"{model.config.architecture}",
        steps=recipe.train.steps,
        batch=recipe.train.batch,
        processes=processes,
        trained=learnt,
        parameters=whole,
        others=looking if kept else 0,
        lines=examples.epoch,
        example=example,
        rows=rows,
        weights=4 * learnt + single * (whole - learnt + kept),
        gradients=4 * learnt,
        optimizer=states,
        activations=activations(recipe, objective, model.config, largest, learnt),
        checkpoint=4 * learnt + states,
        work=2 * objective.forwards * (rows * (passes * inner + 3 * head) + read * looking),
    )


def modelled(recipe: Recipe) -> tuple[Stack, list[Stack]]:
    """The model of a recipe and those that look on, without memory."""
    given = recipe.model
    others: list[Stack] = []
    with torch.device("meta"):
        if given.target is not None:
            target = Transformer(load_config(light(given.target)))
            named = given.init and load_config(light(given.init))
            made: Stack = draft_of(named or translate(given.config), target)
            others.append(target)
        elif given.init is None:
            made = Transformer(translate(given.config))
        else:
            folder = light(given.init)
            config = weights.changed(load_config(folder), given.config, folder / CONFIG)
            made = Transformer(config)
        if recipe.adapter is not None:
            lora.attach(made, recipe.adapter, recipe.train.seed)
    return made, others


def light(name: str) -> Path:
    """Folder of a checkpoint, whose weights are not downloaded for this."""
    return resolve(name, LIGHT)


def head_size(model: Stack) -> int:
    """Numbers of the matrix that makes logits."""
    return model.config.vocab * model.config.dim


def total(parameters: Iterable[torch.Tensor]) -> int:
    """How many numbers they are."""
    return sum(parameter.numel() for parameter in parameters)


def moments(recipe: Recipe, model: nn.Module) -> float:
    """Bytes of the optimizer's state: two numbers for each of AdamW's, one for each of Muon's."""
    return sum(
        (4 if isinstance(optimizer, Muon) else 8) * total(group["params"])
        for optimizer in recipe.optim.build(model)
        for group in optimizer.param_groups
    )


def sampled(
    objective: Objective, examples: Examples, number: int, portion: int, seed: int
) -> list[Sample]:
    """The rows of the first examples, in portions as they are fed."""
    rows = [objective.rows(examples[n], default_rng([seed, n, 2])) for n in range(number)]
    return [Sample(rows[at : at + portion]) for at in range(0, number, portion)]


class Sample:
    """Rows of a portion: how many there are, and how many are scored."""

    def __init__(self, parts: list[Rows]) -> None:
        self.rows = sum(map(len, parts))
        self.scored = sum(int((part.labels != UNSCORED).sum()) for part in parts)

    def __len__(self) -> int:
        return self.rows


def activations(
    recipe: Recipe, objective: Objective, config: ModelConfig, portion: Sample, trained: int
) -> float:
    """Bytes that the backward pass of a portion needs.

    A block keeps, of each row, its input and the normed one twice, queries, keys and values before
    and after rotation and spread over all heads, what they attend to, and gate, up and their
    product: with `recompute` only the input, and all of one block at a time. The head keeps the
    logits of the scored rows, their copy in float32, its gradient, and those of a teacher. Under
    autocast the weights that are trained have a copy in bfloat16.
    """
    fast = recipe.train.precision == "bf16"
    size = 2 if fast else 4
    width, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
    row = 4 * config.dim
    block = row * 2 + size * (3 * config.dim + 6 * width + 4 * shared + 5 * config.mlp)
    layers = config.layers
    kept = row * layers + block if recipe.train.recompute else block * layers
    logit = size + 8 + (16 if objective.taught else 0)
    scored = min(portion.scored, objective.together or portion.scored)
    fed = portion.rows * kept + scored * config.vocab * logit
    return float(objective.forwards * fed + (2 * trained if fast else 0))
