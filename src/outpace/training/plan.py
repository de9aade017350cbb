"""Plan of a recipe before training: model sizes, steps, memory, and estimated time.

Sizes are counted on the meta device, lengths on the first examples, and peak memory in a dry run
of a step. Hours are an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from numpy.random import default_rng
from torch import nn
from torch.optim import Muon

from outpace.models.device import DTYPES
from outpace.models.draft import Draft
from outpace.training import lora
from outpace.training.allocated import ACTIVATIONS, EXCHANGED, LOGITS
from outpace.training.cast import in_dtype, light, modelled
from outpace.training.data import Examples, cut_data
from outpace.training.loop import Loop
from outpace.training.objective import Models
from outpace.training.recipe import Recipe
from outpace.training.rehearsal import FROZEN, TRAINED, rehearsed
from outpace.training.report import duration
from outpace.training.rows import UNSCORED, Rows, pack
from outpace.training.run_setup import tokenizer_of
from outpace.training.scored import teachers
from outpace.training.units import count, gib, total

LOOKED_AT = 64
"""Examples whose lengths are measured; a micro-batch if that is larger."""

CARDS = {24: 40e12, 80: 330e12, 141: 330e12}
"""Assumed operations per second by GB of GPU memory: about a third of the specified peak in dense
bfloat16 (120 TFLOPS, and 989 of an H100 or H200). Not measured.
"""

FILLED = 0.92
"""Usable fraction of a card's memory; the rest is for driver and allocator fragmentation."""

SPREAD = (1, 8, 32)
"""Numbers of devices that a plan compares."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Resources that a run needs.

    Attributes:
        trained, parameters: trained and total parameters of the model.
        others: parameters of the reference models.
        lines: examples of an epoch; None if the data is endless.
        example: mean tokens of an example.
        rows: mean rows of a step, over all devices.
        peak: peak bytes of a device during forward and backward passes, by use.
        gradients, optimizer: bytes of a device when weights are updated.
        checkpoint: bytes of a checkpoint.
        features: bytes of an epoch's stored target features; 0 if none are stored.
        work: operations of a step.
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
    peak: Counter[str]
    gradients: float
    optimizer: float
    checkpoint: float
    features: float
    work: float

    @property
    def weights(self) -> float:
        """Bytes of all weights on a device, trained and frozen."""
        return self.peak[TRAINED] + self.peak[FROZEN]

    @property
    def activations(self) -> float:
        """Bytes of a device that only passes use: activations, logits, communication buffers."""
        return sum(self.peak[use] for use in (ACTIVATIONS, LOGITS, EXCHANGED))

    @property
    def memory(self) -> float:
        """Peak bytes of a device, in the backward pass or in the update.

        Multi-tensor AdamW allocates one temporary per parameter, as large as the gradients.
        """
        update = self.weights + 2 * self.gradients + self.optimizer
        return max(self.peak.total() + self.optimizer, update)

    @property
    def card(self) -> int | None:
        """GB of the smallest card that is large enough; None if none is."""
        return next((size for size in CARDS if self.memory <= FILLED * size * 1e9), None)

    @property
    def seconds(self) -> float:
        """Estimated seconds of the whole run on such cards, without communication."""
        return self.train.steps * self.work / CARDS[self.card or max(CARDS)] / self.processes

    @property
    def place(self) -> str:
        """Description of the smallest card, for output."""
        return "more than any card has" if self.card is None else f"a card of {self.card} GB"

    def described(self) -> Iterator[tuple[str, str]]:
        """Yield the plan's lines as headings and text."""
        frozen = f", and {count(self.others)} in reference models" if self.others else ""
        yield "model", self.model
        yield "parameters", f"{count(self.trained)} trained of {count(self.parameters)}{frozen}"
        size = "endless" if self.lines is None else f"{self.lines:,} examples per epoch"
        yield "data", f"{size}; {self.example:,.0f} tokens per example, mean of the sampled ones"
        batch, steps = self.train.batch, self.train.steps
        tokens = batch * self.example
        yield "step", f"{batch} examples, {tokens:,.0f} tokens, {self.rows:,.0f} rows"
        epoch = f"; {self.lines / batch:,.1f} per epoch" if self.lines else ""
        yield "steps", f"{steps:,}{epoch}"
        yield "memory", f"{gib(self.memory)} per device: {self.place}"
        yield "weights", f"{gib(self.peak[TRAINED])} trained, {gib(self.peak[FROZEN])} frozen"
        yield "update", f"gradients {gib(self.gradients)}, optimizer {gib(self.optimizer)}"
        yield (
            "passes",
            (
                f"activations {gib(self.peak[ACTIVATIONS])}, logits {gib(self.peak[LOGITS])}, "
                f"communication {gib(self.peak[EXCHANGED])}"
            ),
        )
        features = f", {gib(self.features)} for features" if self.features else ""
        yield "disk", f"{gib(2 * self.checkpoint)} for two checkpoints{features}"
        rate = CARDS[self.card or max(CARDS)] / 1e12
        yield "time", f"about {duration(self.seconds)} at {rate:.0f} TFLOPS per device"


class Planner:
    """Builds plans of a recipe for different numbers of devices and loop settings."""

    def __init__(self, recipe: Recipe) -> None:
        """Load configurations, tokenizer and data, but no weights; check all lines."""
        self.recipe = recipe
        with torch.device("meta"):
            self.model, others = modelled(recipe)
        self.others = list(others.values())
        data = cut_data(recipe.data, [each.config for each in (self.model, *self.others)])
        tokenizer = tokenizer_of(light(recipe.model.spoken))
        self.examples = Examples(data, tokenizer, recipe.train.seed)
        self.examples.check()
        self.objective = recipe.objective.bind(self.model.config)
        self.known: dict[int, Rows] = {}
        self.plans: dict[tuple[int, Loop], Plan] = {}

    def rows(self, number: int) -> Rows:
        """Return the rows of an example, cached."""
        if number not in self.known:
            rng = default_rng([self.recipe.train.seed, number, 2])
            self.known[number] = self.objective.rows(self.examples[number], rng)
        return self.known[number]

    def plan(self, processes: int = 1, train: Loop | None = None) -> Plan:
        """Plan a run on `processes` devices, with the recipe's loop settings or others."""
        train = (train or self.recipe.train).over(self.examples.epoch)
        if train.tokens is not None:
            train.share(processes, self.examples.data.longest)
            train = train.of_length(self.example(LOOKED_AT), processes)
        if (processes, train) not in self.plans:
            self.plans[processes, train] = self.made(processes, train)
        return self.plans[processes, train]

    def example(self, sampled: int) -> float:
        """Return the mean tokens of the first `sampled` examples."""
        return sum(len(self.examples[n]) for n in range(sampled)) / sampled

    def made(self, processes: int, train: Loop) -> Plan:
        """Plan a run, with its memory measured in a dry run."""
        recipe, model, objective = self.recipe, self.model, self.objective
        size = train.share(processes)
        sampled = max(LOOKED_AT // size, 1) * size
        samples = [self.rows(number) for number in range(sampled)]
        batches = [samples[at : at + size] for at in range(0, sampled, size)]
        largest = pack(max(batches, key=lambda parts: sum(map(len, parts))))
        trainable = total(p for p in model.parameters() if p.requires_grad)
        every = total(model.parameters())
        frozen = total(p for each in self.others for p in each.parameters())
        separate = frozen + (every if objective.taught and recipe.adapter is None else 0)
        frozen += every if objective.taught else 0
        states, parts = moments(recipe, model), processes if train.shard else 1
        rows = sum(map(len, samples)) / sampled * train.batch
        example = self.example(sampled)
        # One forward, or two with recomputation; backward for inputs, and for trained weights.
        passes = 2 + train.recompute + (recipe.adapter is None)
        inner = total(p for name, p in model.named_parameters() if "embedding" not in name)
        scored = sum(int((each.labels != UNSCORED).sum()) for each in samples)
        scored_share = scored / sum(map(len, samples))
        head = scored_share * model.config.vocab * model.config.dim
        # A target runs over the example once, a teacher over all rows.
        read = example * train.batch if recipe.model.target else rows
        return Plan(
            model=f"{recipe.model.init or recipe.model.target or 'fresh'} as "
            f"{model.config.architecture}",
            train=train,
            processes=processes,
            trained=trainable,
            parameters=every,
            others=separate,
            lines=self.examples.epoch,
            example=example,
            rows=rows,
            peak=self.peak(largest, processes, train),
            gradients=4 * trainable / parts,
            optimizer=states / parts,
            checkpoint=4 * trainable + states,
            features=example * self.stored(),
            work=2 * objective.forwards * (rows * (passes * inner + 3 * head) + read * frozen),
        )

    def stored(self) -> float:
        """Return the bytes of all stored features per token of a mean example."""
        reading = self.objective.reading(self.model.config)
        if self.recipe.data.features is None or reading is None:
            return 0
        size = DTYPES[self.recipe.model.dtype].itemsize
        return reading.width(self.others[0].config) * size * (self.examples.records or 0)

    def peak(self, micro_batch: Rows, processes: int, train: Loop) -> Counter[str]:
        """Measure the peak bytes of a device during forward and backward passes, by use."""
        once = self.objective.once
        peak = rehearsed(
            self.cast,
            once,
            [micro_batch] * min(train.accumulation, 2),
            processes=processes,
            shared=train.shard,
            again=train.recompute,
            precision=train.precision,
        )
        for use in (
            ACTIVATIONS,
            LOGITS,
        ):  # of all forwards, since the backward follows the last one
            peak[use] *= self.objective.forwards // once.forwards
        return peak

    def cast(self) -> Models:
        """Build the models of a run on fake tensors."""
        recipe, taught = self.recipe, self.objective.taught
        model, others = modelled(recipe, attached=False)
        dtype = DTYPES[recipe.model.dtype]
        for each in others.values():
            in_dtype(each, dtype)
        if recipe.adapter is None:
            teacher, _ = modelled(recipe) if taught else (None, {})
            assert not isinstance(teacher, Draft)
            taught_by = {"teacher": teacher} if teacher is not None else {}
        else:
            in_dtype(model, dtype)
            taught_by = teachers(self.objective, model, adapted=True)
            lora.attach(model, recipe.adapter, recipe.train.seed)
        return Models(model, {**taught_by, **others})

    def spread(self, processes: int) -> Iterator[tuple[str, str]]:
        """Yield memory and time with the other `recompute` setting and for numbers of devices."""
        train = self.recipe.train
        parts = processes * train.accumulation
        micro_batch = train.share(processes)
        other = self.plan(processes, replace(train, recompute=not train.recompute))
        word = "true" if other.train.recompute else "false"
        yield f"recompute = {word}", f"{gib(other.memory)} per device: {other.place}"
        for number in SPREAD:
            if train.tokens is None and number > train.batch:
                continue  # some device would get no example
            mine, rest = divmod(train.batch, number)
            if train.tokens is not None or train.balance or rest:
                accumulation = -(-parts // number)
            else:
                sizes = range(1, mine + 1)
                accumulation = next(n for n in sizes if not mine % n and mine // n <= micro_batch)
            loop = replace(train, accumulation=accumulation)
            try:
                loop.share(number, self.examples.data.longest)
            except ValueError:
                reason = f"this batch cannot be divided; --processes {number} shows what to change"
                yield f"on {number}", reason
                continue
            plan = self.plan(number, loop)
            yield (
                f"on {number}",
                (
                    f"{gib(plan.memory)} per device: {plan.place}, accumulation {accumulation}; "
                    f"about {duration(plan.seconds)}"
                ),
            )


def plan(recipe: Recipe, processes: int = 1) -> Plan:
    """Plan a recipe; loads configurations, tokenizer and data, but no weights."""
    return Planner(recipe).plan(processes)


def moments(recipe: Recipe, model: nn.Module) -> float:
    """Return the bytes of optimizer states: two floats per parameter of AdamW, one of Muon."""
    return sum(
        (4 if isinstance(optimizer, Muon) else 8) * total(group["params"])
        for optimizer in recipe.optim.build(model)
        for group in optimizer.param_groups
    )
