"""What a recipe will need, before anything is trained: sizes, steps, memory, work.

Sizes are counted, on models without memory; lengths are those of the first examples; what passes
hold is counted by a step that is rehearsed; hours are an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
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
from outpace.training.scored import teachers
from outpace.training.trainer import tokenizer_of

LOOKED_AT = 64
"""Examples whose lengths are measured, or a portion where that has more."""

CARDS = {24: 40e12, 80: 330e12, 141: 330e12}
"""Operations per second that time is counted with, by GB of a card: about a third of what makers
state for dense bfloat16 (120, and 989 of an H100 and an H200). It is assumed, and was not measured.
"""

FILLED = 0.92
"""Share of a card that tensors may fill; its driver and the allocator's gaps take the rest."""

SPREAD = (1, 8, 32)
"""Numbers of devices that a plan speaks of."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will need.

    Attributes:
        trained, parameters: numbers of the model; of the others that look on: `others`.
        lines: of an epoch; None where data is made without end.
        example: mean tokens of an example.
        rows: mean rows fed in a step, over all devices.
        peak: bytes of a device by what they are for, when forward and backward hold the most.
        gradients, optimizer: bytes of a device when weights are updated.
        checkpoint: bytes of one.
        features: bytes of what a target makes of an epoch, where that is stored.
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
        """Bytes of a device, trained or not."""
        return self.peak[TRAINED] + self.peak[FROZEN]

    @property
    def activations(self) -> float:
        """Bytes of a device that only passes hold: what is kept, logits, what is exchanged."""
        return sum(self.peak[use] for use in (ACTIVATIONS, LOGITS, EXCHANGED))

    @property
    def memory(self) -> float:
        """Bytes of a device, in all: of a backward pass, or of an update where that has more.

        AdamW over many tensors at once takes one more number for each.
        """
        update = self.weights + 2 * self.gradients + self.optimizer
        return max(self.peak.total() + self.optimizer, update)

    @property
    def card(self) -> int | None:
        """GB of the smallest card that holds it; None where none does."""
        return next((size for size in CARDS if self.memory <= FILLED * size * 1e9), None)

    @property
    def seconds(self) -> float:
        """Of the whole run, on such cards; what they exchange takes no time in it."""
        return self.train.steps * self.work / CARDS[self.card or max(CARDS)] / self.processes

    @property
    def place(self) -> str:
        """The card that holds it."""
        return "more than any card has" if self.card is None else f"a card of {self.card} GB"

    def described(self) -> Iterator[tuple[str, str]]:
        """Headings and what stands behind them."""
        looking = f", and {count(self.others)} that only look on" if self.others else ""
        yield "model", self.model
        yield "parameters", f"{count(self.trained)} trained of {count(self.parameters)}{looking}"
        many = "made without end" if self.lines is None else f"{self.lines:,} examples in an epoch"
        yield "data", f"{many}; {self.example:,.0f} tokens in one, of those looked at"
        batch, steps = self.train.batch, self.train.steps
        tokens = batch * self.example
        yield "step", f"{batch} examples, {tokens:,.0f} tokens, {self.rows:,.0f} rows fed"
        epoch = f"; an epoch is {self.lines / batch:,.1f}" if self.lines else ""
        yield "steps", f"{steps:,}{epoch}"
        yield "memory", f"{gib(self.memory)} per device: {self.place}"
        yield "weights", f"{gib(self.peak[TRAINED])} trained, {gib(self.peak[FROZEN])} not"
        yield "update", f"gradients {gib(self.gradients)}, optimizer {gib(self.optimizer)}"
        yield (
            "passes",
            (
                f"activations {gib(self.peak[ACTIVATIONS])}, logits {gib(self.peak[LOGITS])}, "
                f"exchanged {gib(self.peak[EXCHANGED])}"
            ),
        )
        kept = f", {gib(self.features)} for features" if self.features else ""
        yield "disk", f"{gib(2 * self.checkpoint)} for two checkpoints{kept}"
        rate = CARDS[self.card or max(CARDS)] / 1e12
        yield "time", f"about {duration(self.seconds)} at {rate:.0f} TFLOP per second and device"


class Planner:
    """A recipe with the examples that its plans look at."""

    def __init__(self, recipe: Recipe) -> None:
        """Load configurations, tokenizer and data, and no weights; check all lines."""
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
        """What is fed of an example."""
        if number not in self.known:
            rng = default_rng([self.recipe.train.seed, number, 2])
            self.known[number] = self.objective.rows(self.examples[number], rng)
        return self.known[number]

    def plan(self, processes: int = 1, train: Loop | None = None) -> Plan:
        """What each of so many devices needs, by the settings of the recipe or by others."""
        train = (train or self.recipe.train).over(self.examples.epoch)
        if train.tokens is not None:
            train.share(processes, self.examples.data.longest)
            train = train.of_length(self.example(LOOKED_AT), processes)
        if (processes, train) not in self.plans:
            self.plans[processes, train] = self.made(processes, train)
        return self.plans[processes, train]

    def example(self, looked: int) -> float:
        """Mean tokens of so many examples."""
        return sum(len(self.examples[n]) for n in range(looked)) / looked

    def made(self, processes: int, train: Loop) -> Plan:
        """The same, whose passes are rehearsed for it."""
        recipe, model, objective = self.recipe, self.model, self.objective
        share = train.share(processes)
        looked = max(LOOKED_AT // share, 1) * share
        fed = [self.rows(number) for number in range(looked)]
        portions = [fed[at : at + share] for at in range(0, looked, share)]
        largest = pack(max(portions, key=lambda parts: sum(map(len, parts))))
        learnt = total(p for p in model.parameters() if p.requires_grad)
        whole = total(model.parameters())
        looking = total(p for each in self.others for p in each.parameters())
        kept = looking + (whole if objective.taught and recipe.adapter is None else 0)
        looking += whole if objective.taught else 0
        states, parts = moments(recipe, model), processes if train.shard else 1
        rows = sum(map(len, fed)) / looked * train.batch
        example = self.example(looked)
        # Forward once or twice; backward for inputs, and for weights where they are trained.
        passes = 2 + train.recompute + (recipe.adapter is None)
        inner = total(p for name, p in model.named_parameters() if "embedding" not in name)
        scored = sum(int((each.labels != UNSCORED).sum()) for each in fed) / sum(map(len, fed))
        head = scored * model.config.vocab * model.config.dim
        # A target reads the example once, a teacher all rows that are learnt.
        read = example * train.batch if recipe.model.target else rows
        return Plan(
            model=f"{recipe.model.init or recipe.model.target or 'fresh'} as "
            f"{model.config.architecture}",
            train=train,
            processes=processes,
            trained=learnt,
            parameters=whole,
            others=kept,
            lines=self.examples.epoch,
            example=example,
            rows=rows,
            peak=self.peak(largest, processes, train),
            gradients=4 * learnt / parts,
            optimizer=states / parts,
            checkpoint=4 * learnt + states,
            features=example * self.stored(),
            work=2 * objective.forwards * (rows * (passes * inner + 3 * head) + read * looking),
        )

    def stored(self) -> float:
        """Bytes of features on disk, for each token of a mean example."""
        reading = self.objective.reading(self.model.config)
        if self.recipe.data.features is None or reading is None:
            return 0
        size = DTYPES[self.recipe.model.dtype].itemsize
        return reading.width(self.others[0].config) * size * (self.examples.records or 0)

    def peak(self, portion: Rows, processes: int, train: Loop) -> Counter[str]:
        """Bytes of a device when its passes hold the most, by what they are for."""
        once = self.objective.once
        peak = rehearsed(
            self.cast,
            once,
            [portion] * min(train.accumulation, 2),
            processes=processes,
            shared=train.shard,
            again=train.recompute,
            precision=train.precision,
        )
        for use in (ACTIVATIONS, LOGITS):  # of all passes, whose backward comes behind the last
            peak[use] *= self.objective.forwards // once.forwards
        return peak

    def cast(self) -> Models:
        """The models as a run begins with them."""
        recipe, taught = self.recipe, self.objective.taught
        model, others = modelled(recipe, attached=False)
        dtype = DTYPES[recipe.model.dtype]
        for each in others.values():
            in_dtype(each, dtype)
        if recipe.adapter is None:
            teacher, _ = modelled(recipe) if taught else (None, {})
            assert not isinstance(teacher, Draft)
            teaching = {"teacher": teacher} if teacher is not None else {}
        else:
            in_dtype(model, dtype)
            teaching = teachers(self.objective, model, adapted=True)
            lora.attach(model, recipe.adapter, recipe.train.seed)
        return Models(model, {**teaching, **others})

    def spread(self, processes: int) -> Iterator[tuple[str, str]]:
        """What other numbers of devices come to, and the other way to keep activations."""
        train = self.recipe.train
        parts = processes * train.accumulation
        portion = train.share(processes)
        other = self.plan(processes, replace(train, recompute=not train.recompute))
        word = "true" if other.train.recompute else "false"
        yield f"recompute = {word}", f"{gib(other.memory)} per device: {other.place}"
        for number in SPREAD:
            if train.tokens is None and number > train.batch:
                continue  # a device would have no example
            mine, rest = divmod(train.batch, number)
            if train.tokens is not None or train.balance or rest:
                portions = -(-parts // number)
            else:
                sizes = range(1, mine + 1)
                portions = next(n for n in sizes if not mine % n and mine // n <= portion)
            loop = replace(train, accumulation=portions)
            try:
                loop.share(number, self.examples.data.longest)
            except ValueError:
                reason = f"this batch cannot be shared; --processes {number} names what to change"
                yield f"on {number}", reason
                continue
            made = self.plan(number, loop)
            yield (
                f"on {number}",
                (
                    f"{gib(made.memory)} per device: {made.place}, accumulation {portions}; "
                    f"about {duration(made.seconds)}"
                ),
            )


def plan(recipe: Recipe, processes: int = 1) -> Plan:
    """What a recipe needs; loads configurations, tokenizer and data, and no weights."""
    return Planner(recipe).plan(processes)


def count(parameters: int) -> str:
    """A number of parameters in millions."""
    return f"{parameters / 1e6:,.2f}M"


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:,.2f} GiB"


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
