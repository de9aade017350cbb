"""Plan of a recipe before training: model sizes, steps, memory, and estimated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from outpace.training.dry_run import FROZEN, TRAINED
from outpace.training.loop import Loop
from outpace.training.memory_tracker import ACTIVATIONS, COMMUNICATION, LOGITS
from outpace.training.report import format_duration
from outpace.training.units import format_gib, format_millions

CARD_FLOPS = {24: 40e12, 80: 330e12, 141: 330e12}
"""Assumed operations per second by GB of GPU memory: about a third of the specified peak in dense
bfloat16 (120 TFLOPS, and 989 of an H100 or H200). Not measured.
"""

MAX_CARD_FRACTION = 0.92
"""Usable fraction of a card's memory; the rest is for driver and allocator fragmentation."""


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
        features: bytes of the target features that are still to be stored.
        work: operations of a step.
        reading: operations of a target that reads examples once, for features to be stored.
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
    reading: float

    @property
    def total_work(self) -> float:
        """Operations of the whole run."""
        return self.train.steps * self.work + self.reading

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights on a device, trained and frozen."""
        return self.peak[TRAINED] + self.peak[FROZEN]

    @property
    def device_bytes(self) -> float:
        """Peak bytes of a device, in the backward pass or in the update.

        Multi-tensor AdamW allocates one temporary per parameter, as large as the gradients.
        """
        update = self.weight_bytes + 2 * self.gradients + self.optimizer
        return max(self.peak.total() + self.optimizer, update)

    @property
    def smallest_card(self) -> int | None:
        """GB of the smallest card that is large enough; None if none is."""
        return next(
            (size for size in CARD_FLOPS if self.device_bytes <= MAX_CARD_FRACTION * size * 1e9),
            None,
        )

    @property
    def total_seconds(self) -> float:
        """Estimated seconds of the whole run on such cards, without communication."""
        return self.total_work / CARD_FLOPS[self.smallest_card or max(CARD_FLOPS)] / self.processes

    @property
    def card_description(self) -> str:
        """Description of the smallest card, for output."""
        return (
            "more than any card has"
            if self.smallest_card is None
            else f"a card of {self.smallest_card} GB"
        )

    def describe_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the plan's lines as headings and text."""
        frozen = f", and {format_millions(self.others)} in reference models" if self.others else ""
        yield "model", self.model
        yield (
            "parameters",
            f"{format_millions(self.trained)} trained of "
            f"{format_millions(self.parameters)}{frozen}",
        )
        size = "endless" if self.lines is None else f"{self.lines:,} examples per epoch"
        yield "data", f"{size}; {self.example:,.0f} tokens per example, mean of the sampled ones"
        batch, steps = self.train.batch, self.train.steps
        tokens = batch * self.example
        yield "step", f"{batch} examples, {tokens:,.0f} tokens, {self.rows:,.0f} rows"
        epoch = f"; {self.lines / batch:,.1f} per epoch" if self.lines else ""
        yield "steps", f"{steps:,}{epoch}"
        yield "memory", f"{format_gib(self.device_bytes)} per device: {self.card_description}"
        yield (
            "weights",
            f"{format_gib(self.peak[TRAINED])} trained, {format_gib(self.peak[FROZEN])} frozen",
        )
        yield (
            "update",
            f"gradients {format_gib(self.gradients)}, optimizer {format_gib(self.optimizer)}",
        )
        yield (
            "passes",
            (
                f"activations {format_gib(self.peak[ACTIVATIONS])}, logits "
                f"{format_gib(self.peak[LOGITS])}, "
                f"communication {format_gib(self.peak[COMMUNICATION])}"
            ),
        )
        features = f", {format_gib(self.features)} for features" if self.features else ""
        yield "disk", f"{format_gib(2 * self.checkpoint)} for two checkpoints{features}"
        rate = CARD_FLOPS[self.smallest_card or max(CARD_FLOPS)] / 1e12
        yield "time", f"about {format_duration(self.total_seconds)} at {rate:.0f} TFLOPS per device"
