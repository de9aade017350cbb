"""Plan of a recipe before training: sums of model sizes, steps, memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from numpy.random import default_rng
from torch import nn
from torch.optim import Muon

from outpace.checkpoints.load import CONFIG_FILE, load_config, resolve_checkpoint, translate_config
from outpace.checkpoints.stored_size import quantized_bytes
from outpace.models.config import ModelConfig
from outpace.models.device import DTYPES
from outpace.models.draft import Draft
from outpace.models.extending import build_draft_model
from outpace.models.transformer import Transformer
from outpace.training import lora, weights
from outpace.training.data import Examples, check_origin, limit_length
from outpace.training.loop import Loop
from outpace.training.objective import ENTRIES
from outpace.training.recipe import Recipe
from outpace.training.report import format_duration
from outpace.training.rows import UNSCORED
from outpace.training.run_setup import require_tokenizer
from outpace.training.store import count_missing

LOGIT_COPIES = 4
"""Tensors of the size of the logits: logits, log-probabilities, and the gradients of both."""

CARD_FLOPS = {24: 40e12, 80: 330e12, 141: 330e12}
"""Assumed operations per second by GB of GPU memory: about a third of the specified peak in dense
bfloat16 (120 TFLOPS, and 989 of an H100 or H200). Not measured.
"""

MAX_CARD_FRACTION = 0.92
"""Usable fraction of a card's memory; the rest is for driver and allocator fragmentation."""

SAMPLED_EXAMPLES = 64
"""Examples whose lengths are measured; a micro-batch if that is larger."""

METADATA_PATTERNS = ("*.json", "*.txt", "*.jinja")
"""Patterns of the files of a hub repository other than weights."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Resources that a run needs.

    Attributes:
        trained, parameters: trained and total parameters of the model.
        others: parameters of the reference models.
        lines: examples of an epoch; None if the data is endless.
        example: mean tokens of an example.
        rows: mean rows of a step, over all devices.
        weights, frozen: bytes of trained and of frozen weights on a device; gradients take as
            much as trained weights.
        copies: bytes of copies of weights on a device: in bfloat16, or gathered shards.
        optimizer: bytes of its states on a device.
        activations: bytes that the forward pass of the largest micro-batch keeps.
        transient: bytes of its logits, or of one recomputed layer if that is larger.
        features: bytes of the target features that are still to be stored.
        work: operations of the whole run.
    """

    model: str
    train: Loop
    processes: int
    trained: int
    parameters: int
    others: int
    lines: int | None
    example: float
    rows: float
    weights: float
    frozen: float
    copies: float
    optimizer: float
    activations: float
    transient: float
    features: float
    work: float

    @property
    def device_bytes(self) -> float:
        """Peak bytes of a device, in the backward pass or in the update.

        Multi-tensor AdamW allocates one temporary per parameter, as large as the gradients.
        """
        passes = self.copies + self.activations + self.transient
        states = 2 * self.weights + self.frozen + self.optimizer
        return states + max(passes, self.weights)

    @property
    def checkpoint(self) -> float:
        return (self.weights + self.optimizer) * (self.processes if self.train.shard else 1)

    @property
    def smallest_card(self) -> int | None:
        return next(
            (size for size in CARD_FLOPS if self.device_bytes <= MAX_CARD_FRACTION * size * 1e9),
            None,
        )

    @property
    def flops(self) -> float:
        return CARD_FLOPS[self.smallest_card or max(CARD_FLOPS)]

    @property
    def total_seconds(self) -> float:
        """Estimated seconds of the whole run, without communication."""
        return self.work / self.flops / self.processes

    def describe_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the plan's lines as headings and text."""
        frozen = f", and {self.others / 1e6:,.2f}M in reference models" if self.others else ""
        yield "model", self.model
        yield (
            "parameters",
            f"{self.trained / 1e6:,.2f}M trained of {self.parameters / 1e6:,.2f}M{frozen}",
        )
        size = "endless" if self.lines is None else f"{self.lines:,} examples per epoch"
        yield "data", f"{size}; {self.example:,.0f} tokens per example, mean of the sampled ones"
        batch, steps = self.train.batch, self.train.steps
        tokens = batch * self.example
        yield "step", f"{batch} examples, {tokens:,.0f} tokens, {self.rows:,.0f} rows"
        epoch = f"; {self.lines / batch:,.1f} per epoch" if self.lines else ""
        yield "steps", f"{steps:,}{epoch}"
        card = self.smallest_card
        fits = "more than any card has" if card is None else f"a card of {card} GB"
        yield "memory", f"{format_gib(self.device_bytes)} per device: {fits}"
        for name, parts in {
            "weights": {"trained": self.weights, "frozen": self.frozen, "copies": self.copies},
            "update": {"gradients": self.weights, "optimizer": self.optimizer},
            "passes": {"activations": self.activations, "logits or layer": self.transient},
        }.items():
            yield name, ", ".join(f"{part} {format_gib(size)}" for part, size in parts.items())
        features = f", {format_gib(self.features)} for features" if self.features else ""
        yield "disk", f"{format_gib(2 * self.checkpoint)} for two checkpoints{features}"
        duration = format_duration(self.total_seconds)
        yield "time", f"about {duration} at {self.flops / 1e12:.0f} TFLOPS per device"


def format_gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def plan_recipe(recipe: Recipe, processes: int = 1) -> Plan:
    """Plan a run on `processes` devices, from configurations, tokenizer and data only.

    Raises:
        ValueError: the recipe or a line of the data is invalid.
    """
    with torch.device("meta"):
        model, targets = build_models(recipe)
    examples = open_examples(recipe, [each.config for each in (model, *targets)])
    train = fit_loop(recipe.train, examples, processes)
    objective, config = recipe.objective.bind(model.config), model.config
    size = train.micro_batch_size(processes)
    numbers = range(max(SAMPLED_EXAMPLES // size, 1) * size)
    samples = [objective.rows(examples[n], default_rng([train.seed, n, 2])) for n in numbers]
    example = sum(len(examples[n]) for n in numbers) / len(numbers)
    lengths = torch.tensor([len(each) for each in samples])
    scored = torch.tensor([int((each.labels != UNSCORED).sum()) for each in samples])
    largest, most_scored = (int(each.view(-1, size).sum(1).max()) for each in (lengths, scored))
    rows = int(lengths.sum()) / len(numbers) * train.batch

    trained, every = trained_size(model), size_of(model)
    teacher = every if objective.needs_teacher and recipe.adapter is None else 0
    states, parts = optimizer_bytes(recipe, model), processes if train.shard else 1
    forwards, vocab = objective.forward_count, config.draft_vocab or config.vocab
    half, itemsize = train.precision == "bf16", DTYPES[recipe.model.dtype].itemsize
    logits = 4 * LOGIT_COPIES * min(forwards * most_scored * vocab, ENTRIES)
    saved, layer = row_bytes(config, half=half, recompute=train.recompute)

    reading = objective.feature_spec(config)
    width = reading.feature_width(targets[0].config) if reading is not None else 0
    stored = width > 0 and recipe.data.features is not None
    missing = count_missing(recipe.data.features or "", examples.record_count or 0) * stored
    # One forward, or two with recomputation; backward for inputs, and for trained weights.
    passes, inner = 2 + train.recompute + (recipe.adapter is None), count_inner(model)
    head = int(scored.sum()) / int(lengths.sum()) * vocab * config.dim
    work = rows * (passes * inner + 3 * head)
    # A teacher reads all rows; a target reads examples, in each step or once for stored features.
    taught = rows * inner * objective.needs_teacher
    read = example * (missing if stored else train.steps * train.batch)
    return Plan(
        model=f"{recipe.model.init or recipe.model.target or 'fresh'} as {config.architecture}",
        train=train,
        processes=processes,
        trained=trained,
        parameters=every,
        others=sum(map(size_of, targets)) + teacher,
        lines=examples.epoch_size,
        example=example,
        rows=rows,
        weights=4 * trained / parts,
        frozen=frozen_bytes(recipe, model, targets, parts)
        + 4 * (teacher and reference_size(model, parts)),
        copies=copied_bytes(model, half=half, sharded=parts > 1),
        optimizer=states / parts,
        activations=largest * (forwards * saved + width * itemsize),
        transient=max(logits, largest * layer),
        features=example * missing * width * itemsize,
        work=2 * forwards * train.steps * (work + taught)
        + 2 * read * sum(map(count_inner, targets)),
    )


def open_examples(recipe: Recipe, configs: Sequence[ModelConfig]) -> Examples:
    """Open the examples of a recipe, and check all lines."""
    data = limit_length(recipe.data, configs)
    tokenizer = require_tokenizer(resolve_metadata(recipe.model.tokenizer_source))
    examples = Examples(data, tokenizer, recipe.train.seed)
    examples.check_records()
    if recipe.model.target is not None and Path(recipe.model.target).exists():
        check_origin(examples, recipe.model.target)  # needs the weights, which are not downloaded
    return examples


def fit_loop(train: Loop, examples: Examples, processes: int) -> Loop:
    """Return the loop with its number of steps and its mean number of examples per step."""
    train = train.with_epochs(examples.epoch_size)
    train.micro_batch_size(processes, examples.data.longest)
    tokens = sum(len(examples[number]) for number in range(SAMPLED_EXAMPLES))
    return train.with_batch(tokens / SAMPLED_EXAMPLES, processes)


def copied_bytes(model: Transformer | Draft, *, half: bool, sharded: bool) -> int:
    """Return the bytes of copies of weights: of shards, or in bfloat16 under autocast.

    Shards are gathered of two layers at a time, and of all weights outside layers.
    """
    if not sharded:
        return 2 * trained_size(model) * half
    layers = size_of(model.blocks)
    return (2 if half else 4) * (size_of(model) - layers + 2 * layers // len(model.blocks))


def row_bytes(config: ModelConfig, *, half: bool, recompute: bool) -> tuple[int, int]:
    """Return the bytes of one row that layers keep, and that one layer recomputes.

    A layer keeps its input and that of its MLP, both in float32, and with the dtype of products:
    both after their norms; projected, normalised and rotated queries, keys and values, those for
    all heads, and the output of attention; and the MLP's gate, its activation, input and output.
    """
    projected = config.heads + config.kv_heads
    shared = 2 * config.heads if config.heads > config.kv_heads else 0
    attention = projected * (2 + config.qk_norm) + config.kv_heads + shared + 2 * config.heads
    experts = config.experts_per_row or 1
    values = 2 * config.dim + attention * config.head_dim + 4 * config.mlp * experts
    layer = 8 * config.dim + (2 if half else 4) * values
    return (4 * config.dim * config.layers, layer) if recompute else (layer * config.layers, 0)


def frozen_bytes(
    recipe: Recipe, model: Transformer | Draft, targets: Sequence[Transformer], parts: int
) -> float:
    """Return the bytes on a device of frozen weights of a model and its target."""
    dtype, form = DTYPES[recipe.model.dtype], recipe.target_format
    size = (size_of(model) - trained_size(model)) * dtype.itemsize / parts
    for target in targets:
        if form is None:
            size += reference_size(target, parts) * dtype.itemsize
        else:
            assert recipe.model.target is not None
            borrowed = isinstance(model, Draft) and model.unembedding is None
            folder = resolve_metadata(recipe.model.target)
            size += quantized_bytes(folder, target, dtype, form, dense_head=borrowed)
    return size


def build_models(recipe: Recipe) -> tuple[Transformer | Draft, list[Transformer]]:
    given, targets = recipe.model, list[Transformer]()
    if given.target is not None:
        targets = [Transformer(load_config(resolve_metadata(given.target)))]
        published = given.init and load_config(resolve_metadata(given.init))
        config = weights.check_draft_config(published or translate_config(given.config))
        model: Transformer | Draft = build_draft_model(config, targets[0])
    elif given.init is None:
        model = Transformer(translate_config(given.config))
    else:
        folder = resolve_metadata(given.init)
        config = weights.change_config(load_config(folder), given.config, folder / CONFIG_FILE)
        model = Transformer(config)
    weights.check_trainable(model.config)
    weights.mark_trainable(model)
    if recipe.adapter is not None:
        lora.attach_adapter(model, recipe.adapter, recipe.train.seed)
    return model, targets


def resolve_metadata(name: str) -> Path:
    """Return the folder of a checkpoint without downloading its weights."""
    return resolve_checkpoint(name, METADATA_PATTERNS)


def reference_size(model: Transformer | Draft, parts: int) -> float:
    """Return the parameters on a device of a reference model, of which only blocks are sharded."""
    blocks = size_of(model.blocks)
    return size_of(model) - blocks + blocks / parts


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def trained_size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_inner(model: nn.Module) -> int:
    """Count the parameters that each row is multiplied with, without embedding and head."""
    return sum(p.numel() for name, p in model.named_parameters() if "embedding" not in name)


def optimizer_bytes(recipe: Recipe, model: nn.Module) -> float:
    """Return the bytes of optimizer states: two floats per parameter of AdamW, one of Muon."""
    return sum(
        (4 if isinstance(optimizer, Muon) else 8)
        * sum(parameter.numel() for parameter in group["params"])
        for optimizer in recipe.optim.build_optimizers(model)
        for group in optimizer.param_groups
    )
