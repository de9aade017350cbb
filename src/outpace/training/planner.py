"""Builds the plan of a recipe.

Sizes are counted on the meta device, lengths on the first examples, and peak memory in a dry run
of a step. Hours are an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from numpy.random import default_rng
from torch import nn
from torch.optim import Muon

from outpace.checkpoints.stored_size import quantized_bytes
from outpace.models.device import DTYPES
from outpace.models.draft import Draft
from outpace.training import lora
from outpace.training.data import Examples, limit_length
from outpace.training.data_origin import check_origin
from outpace.training.dry_run import FROZEN, measure_peak_memory
from outpace.training.loop import Loop
from outpace.training.loss_module import build_teachers
from outpace.training.memory_tracker import ACTIVATIONS, LOGITS
from outpace.training.objective import Models
from outpace.training.plan import Plan
from outpace.training.recipe import Recipe
from outpace.training.recipe_models import build_models, cast_parameters, resolve_metadata
from outpace.training.report import format_duration
from outpace.training.rows import UNSCORED, Rows, pack_documents
from outpace.training.run_setup import require_tokenizer
from outpace.training.store import count_missing
from outpace.training.units import count_elements, format_gib

SAMPLED_EXAMPLES = 64
"""Examples whose lengths are measured; a micro-batch if that is larger."""

DEVICE_COUNTS = (1, 8, 32)
"""Numbers of devices that a plan compares."""


class Planner:
    """Builds plans of a recipe for different numbers of devices and loop settings."""

    def __init__(self, recipe: Recipe) -> None:
        """Load configurations, tokenizer and data, but no weights; check all lines."""
        self.recipe = recipe
        with torch.device("meta"):
            self.model, others = build_models(recipe)
        self.others = [*others.values()]
        data = limit_length(recipe.data, [each.config for each in (self.model, *self.others)])
        tokenizer = require_tokenizer(resolve_metadata(recipe.model.tokenizer_source))
        self.examples = Examples(data, tokenizer, recipe.train.seed)
        self.examples.check_records()
        if (target := recipe.model.target) is not None and Path(target).exists():
            check_origin(self.examples, target)  # needs the weights, which are not downloaded
        self.objective = recipe.objective.bind(self.model.config)
        self.rows_by_number: dict[int, Rows] = {}
        self.plans: dict[tuple[int, Loop], Plan] = {}

    def example_rows(self, number: int) -> Rows:
        """Return the rows of an example, cached."""
        if number not in self.rows_by_number:
            rng = default_rng([self.recipe.train.seed, number, 2])
            self.rows_by_number[number] = self.objective.rows(self.examples[number], rng)
        return self.rows_by_number[number]

    def build_plan(self, processes: int = 1, train: Loop | None = None) -> Plan:
        """Plan a run on `processes` devices, with the recipe's loop settings or others."""
        train = (train or self.recipe.train).with_epochs(self.examples.epoch_size)
        if train.tokens is not None:
            train.micro_batch_size(processes, self.examples.data.longest)
            train = train.with_batch(self.mean_tokens(SAMPLED_EXAMPLES), processes)
        if (processes, train) not in self.plans:
            self.plans[processes, train] = self.measure_plan(processes, train)
        return self.plans[processes, train]

    def mean_tokens(self, sampled: int) -> float:
        """Return the mean tokens of the first `sampled` examples."""
        return sum(len(self.examples[n]) for n in range(sampled)) / sampled

    def measure_plan(self, processes: int, train: Loop) -> Plan:
        """Plan a run, with its memory measured in a dry run."""
        recipe, model, objective = self.recipe, self.model, self.objective
        size = train.micro_batch_size(processes)
        sampled = max(SAMPLED_EXAMPLES // size, 1) * size
        samples = [self.example_rows(number) for number in range(sampled)]
        batches = [samples[at : at + size] for at in range(0, sampled, size)]
        largest = pack_documents(max(batches, key=lambda parts: sum(map(len, parts))))
        trainable = count_elements(p for p in model.parameters() if p.requires_grad)
        every = count_elements(model.parameters())
        separate = count_elements(p for each in self.others for p in each.parameters())
        separate += every if objective.needs_teacher and recipe.adapter is None else 0
        states, parts = optimizer_bytes(recipe, model), processes if train.shard else 1
        rows = sum(map(len, samples)) / sampled * train.batch
        example = self.mean_tokens(sampled)
        # One forward, or two with recomputation; backward for inputs, and for trained weights.
        passes = 2 + train.recompute + (recipe.adapter is None)
        inner = count_inner(model)
        scored = sum(int((each.labels != UNSCORED).sum()) for each in samples)
        scored_share = scored / sum(map(len, samples))
        config = model.config
        head = scored_share * (config.draft_vocab or config.vocab) * config.dim
        frozen_inner = sum(map(count_inner, self.others)) + inner * objective.needs_teacher
        row_bytes, missing = self.feature_bytes()
        # A target runs over an example once, in each step or for stored features; a teacher over
        # all rows of each forward.
        read = 2 * example * frozen_inner if recipe.model.target else 0
        taught = 0 if recipe.model.target else frozen_inner
        forward = 2 * rows * (passes * inner + 3 * head + taught)
        return Plan(
            model=f"{recipe.model.init or recipe.model.target or 'fresh'} as {config.architecture}",
            train=train,
            processes=processes,
            trained=trainable,
            parameters=every,
            others=separate,
            lines=self.examples.epoch_size,
            example=example,
            rows=rows,
            peak=self.measure_peak(largest, processes, train),
            gradients=4 * trainable / parts,
            optimizer=states / parts,
            checkpoint=4 * trainable + states,
            features=example * row_bytes * missing,
            work=objective.forward_count * forward + (0 if row_bytes else train.batch * read),
            reading=read * missing,
        )

    def feature_bytes(self) -> tuple[int, int]:
        """Return the bytes of a token's stored features, and how many examples lack them."""
        reading, folder = self.objective.feature_spec(self.model.config), self.recipe.data.features
        if folder is None or reading is None:
            return 0, 0
        width = reading.feature_width(self.others[0].config)
        missing = count_missing(folder, self.examples.record_count or 0)
        return width * DTYPES[self.recipe.model.dtype].itemsize, missing

    def measure_peak(self, micro_batch: Rows, processes: int, train: Loop) -> Counter[str]:
        """Measure the peak bytes of a device during forward and backward passes, by use."""
        once = self.objective.single_forward
        peak = measure_peak_memory(
            self.build_fake_models,
            once,
            [micro_batch] * min(train.accumulation, 2),
            processes=processes,
            sharded=train.shard,
            recomputes=train.recompute,
            precision=train.precision,
        )
        for use in (
            ACTIVATIONS,
            LOGITS,
        ):  # of all forwards, since the backward follows the last one
            peak[use] *= self.objective.forward_count // once.forward_count
        peak[FROZEN] -= self.spared_bytes()
        return peak

    def spared_bytes(self) -> int:
        """Return by how many bytes a target is smaller because its matrices are quantized."""
        recipe, form = self.recipe, self.recipe.target_format
        if recipe.model.target is None or form is None:
            return 0
        (target,), dtype = self.others, DTYPES[recipe.model.dtype]
        borrowed = isinstance(self.model, Draft) and self.model.unembedding is None
        folder = resolve_metadata(recipe.model.target)
        size = quantized_bytes(folder, target, dtype, form, dense_head=borrowed)
        return count_elements(target.parameters()) * dtype.itemsize - size

    def build_fake_models(self) -> Models:
        """Build the models of a run on fake tensors."""
        recipe, taught = self.recipe, self.objective.needs_teacher
        model, others = build_models(recipe, with_adapter=False)
        dtype = DTYPES[recipe.model.dtype]
        for each in others.values():
            cast_parameters(each, dtype)
        if recipe.adapter is None:
            teacher, _ = build_models(recipe) if taught else (None, {})
            assert not isinstance(teacher, Draft)
            taught_by = {"teacher": teacher} if teacher is not None else {}
        else:
            cast_parameters(model, dtype)
            taught_by = build_teachers(self.objective, model, adapted=True)
            lora.attach_adapter(model, recipe.adapter, recipe.train.seed)
        return Models(model, {**taught_by, **others})

    def compare_devices(self, processes: int) -> Iterator[tuple[str, str]]:
        """Yield memory and time with the other `recompute` setting and for numbers of devices."""
        train = self.recipe.train
        parts = processes * train.accumulation
        micro_batch = train.micro_batch_size(processes)
        other = self.build_plan(processes, replace(train, recompute=not train.recompute))
        word = "true" if other.train.recompute else "false"
        yield (
            f"recompute = {word}",
            f"{format_gib(other.device_bytes)} per device: {other.card_description}",
        )
        for number in DEVICE_COUNTS:
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
                loop.micro_batch_size(number, self.examples.data.longest)
            except ValueError:
                reason = f"this batch cannot be divided; --processes {number} shows what to change"
                yield f"on {number}", reason
                continue
            plan = self.build_plan(number, loop)
            yield (
                f"on {number}",
                (
                    f"{format_gib(plan.device_bytes)} per device: "
                    f"{plan.card_description}, accumulation {accumulation}; "
                    f"about {format_duration(plan.total_seconds)}"
                ),
            )


def count_inner(model: nn.Module) -> int:
    """Count the parameters that each row is multiplied with, without embedding and head."""
    named = model.named_parameters()
    return count_elements(p for name, p in named if "embedding" not in name)


def optimizer_bytes(recipe: Recipe, model: nn.Module) -> float:
    """Return the bytes of optimizer states: two floats per parameter of AdamW, one of Muon."""
    return sum(
        (4 if isinstance(optimizer, Muon) else 8) * count_elements(group["params"])
        for optimizer in recipe.optim.build_optimizers(model)
        for group in optimizer.param_groups
    )
