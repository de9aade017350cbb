"""Plan of a recipe before training: model sizes, steps, memory, and estimated time."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed._meta_registrations
import torch.testing._internal.distributed.fake_pg
from numpy.random import default_rng
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from outpace.attention.ranges import CPU_DEVICE
from outpace.checkpoints.load import CONFIG_FILE, load_config, resolve_checkpoint, translate_config
from outpace.checkpoints.stored_size import quantized_bytes
from outpace.models.device import DTYPES
from outpace.models.draft import Draft
from outpace.models.extending import build_draft_model
from outpace.models.norm import freeze_model
from outpace.models.transformer import Transformer
from outpace.training import lora, weights
from outpace.training.data import Examples, check_origin, limit_length
from outpace.training.loop import Loop
from outpace.training.objective import (
    LossModule,
    Models,
    Objective,
    build_teachers,
    ignore_norm_advice,
)
from outpace.training.recipe import Recipe
from outpace.training.recompute import recompute_blocks
from outpace.training.report import format_duration
from outpace.training.rows import UNSCORED, Rows, pack_documents
from outpace.training.run_setup import require_tokenizer
from outpace.training.shard import local_rows, shard_frozen, shard_model
from outpace.training.store import count_missing


def format_millions(parameters: int) -> str:
    """Format a number of parameters in millions."""
    return f"{parameters / 1e6:,.2f}M"


def format_gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / 2**30:,.2f} GiB"


def count_elements(parameters: Iterable[torch.Tensor]) -> int:
    """Return the total number of elements."""
    return sum(parameter.numel() for parameter in parameters)


ACTIVATIONS, LOGITS, COMMUNICATION = "activations", "logits", "exchanged"


class MemoryTracker(TorchDispatchMode):
    """Counts the storage of every operation's outputs until it is freed.

    Temporary memory of kernels and allocator fragmentation are not counted. Any thread may free a
    storage, such as those of torch.distributed, but only the computation's own thread counts.

    Attributes:
        now: live bytes, by use.
        peak: live bytes by use when their total was largest.
    """

    def __init__(self, vocab: int = 0) -> None:
        """Initialize; tensors with a last axis of `vocab` are logits, 1-D ones communication."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab = vocab
        self.storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}
        self.flat_keys: set[int] = set()
        self.freed_keys: deque[int] = deque()
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def track_tensors(self, tensors: Iterable[Tensor], use: str = "") -> None:
        """Count tensors not counted yet, under `use` or, if empty, by their shape."""
        for tensor in map(local_rows, tensors):
            storage = tensor.untyped_storage()
            self.forget_freed_storages()  # a new storage may have the address of a freed one
            if (key := storage._cdata) not in self.storages:
                label = use or self.classify_tensor(tensor)
                self.storages[key] = self.reference_storage(storage, key), label, storage.nbytes()
                self.now[label] += storage.nbytes()
                if label == COMMUNICATION:
                    self.flat_keys.add(key)

    def relabel_tensors(self, tensors: Iterable[Tensor], use: str) -> None:
        """Count tensors under another use."""
        for tensor in map(local_rows, tensors):
            self.forget_freed_storages()
            if (key := tensor.untyped_storage()._cdata) in self.storages:
                self.forget_storage(key)
            self.track_tensors([tensor], use)

    def reference_storage(
        self, storage: torch.UntypedStorage, key: int
    ) -> weakref.ref[torch.UntypedStorage]:
        """Return a weak reference that records when the storage is freed."""
        return weakref.ref(storage, lambda _: self.freed_keys.append(key))

    def forget_freed_storages(self) -> None:
        """Stop counting the storages freed since the last call."""
        while self.freed_keys:
            self.forget_storage(self.freed_keys.popleft())

    def forget_storage(self, key: int) -> None:
        """Stop counting a storage."""
        _, use, size = self.storages.pop(key)
        self.now[use] -= size
        self.flat_keys.discard(key)

    def classify_tensor(self, tensor: Tensor) -> str:
        """Return the use of a new tensor, by its shape."""
        if tensor.dim() > 1:
            return LOGITS if tensor.shape[-1] == self.vocab else ACTIVATIONS
        return COMMUNICATION

    def update_sizes(self) -> None:
        """Update the sizes of flat tensors, which FSDP resizes in place."""
        for key in self.flat_keys:
            reference, use, size = self.storages[key]
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self.storages[key] = reference, use, storage.nbytes()
                self.now[use] += storage.nbytes() - size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and track its outputs."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched here separately
        out = func(*args, **(kwargs or {}))
        self.track_tensors(each for each in tree_iter(out) if isinstance(each, Tensor))
        self.forget_freed_storages()
        self.update_sizes()
        if self.now.total() > self.peak.total():
            self.peak = Counter(self.now)
        return out


TRAINED, FROZEN, GRADIENTS = "trained", "frozen", "gradients"

INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
)


def integer_indices(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace boolean indices by integer ones, so that the shape of the result is known."""
    converted: list[Tensor | None] = []
    for each in indices:
        if each is None or each.dtype != torch.bool or isinstance(each, FakeTensor):
            converted.append(each)
        else:
            converted.extend(each.nonzero().unbind(1))
    return converted


class FakeFloatMode(TorchDispatchMode):
    """Makes new floating-point tensors fake, without memory or values.

    Integer tensors stay real, so that control flow that depends on them is that of a real run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on fake tensors if an argument is fake or the result is a float."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched here separately
        kwargs = kwargs or {}
        if func in INDEXING:
            args = args[0], integer_indices(args[1]), *args[2:]
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if not tensors or any(isinstance(each, FakeTensor) for each in tensors):
            with self.fake:
                out = func(*args, **kwargs)
            if tensors or not isinstance(out, Tensor) or out.is_floating_point():
                return out
        return func(*args, **kwargs)


@contextmanager
def fake_process_group(processes: int) -> Iterator[None]:
    """Create a fake process group of this size, with this process as rank 0."""
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("fake", rank=0, world_size=processes, store=store)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def measure_peak_memory(
    load_models: Callable[[], Models],
    objective: Objective,
    micro_batches: Sequence[Rows],
    *,
    processes: int,
    sharded: bool,
    recomputes: bool,
    precision: str,
) -> Counter[str]:
    """Return the peak bytes of a device during forward and backward passes, by use.

    Gradients of `micro_batches` are accumulated. Optimizer states are not included. With
    `recomputes`, blocks use gradient checkpointing.

    Raises:
        ValueError: shapes depend on values, as in a mixture of experts.
    """
    sharded = sharded and processes > 1
    with fake_process_group(processes) if sharded else nullcontext(), FakeFloatMode():
        models = load_models()
        model, others = models.trained, models.others
        if recomputes:
            recompute_blocks(model)
        scored = LossModule(objective, Models(model.train(), others), precision)
        if sharded:
            mesh = init_device_mesh(CPU_DEVICE.type, (processes,))
            shard_frozen(others.values(), CPU_DEVICE, mesh)
            shard_model(scored, model, precision, mesh)
        for each in () if sharded else others.values():
            freeze_model(each)
        memory = MemoryTracker(model.config.draft_vocab or model.config.vocab)
        trainable = [p for p in model.parameters() if p.requires_grad]
        memory.track_tensors(trainable, TRAINED)
        for module in (model, *others.values()):
            memory.track_tensors((*module.parameters(), *module.buffers()), FROZEN)
        if processes > 1 and not sharded:
            for parameter in trainable:  # DDP's gradient buckets exist during the whole step
                parameter.grad = torch.zeros_like(parameter)
        for rows in micro_batches:
            memory.relabel_tensors((p.grad for p in trainable if p.grad is not None), GRADIENTS)
            try:
                with warnings.catch_warnings(), memory:
                    ignore_norm_advice()
                    loss, _ = scored(rows)
                    (loss / rows.normaliser).backward()
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"the memory of this model cannot be planned: shapes depend on values "
                    f"({error.func}), as in a mixture of experts"
                ) from error
            del loss
        return memory.peak


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


METADATA_PATTERNS = ("*.json", "*.txt", "*.jinja")
"""Patterns of the files of a hub repository other than weights."""


def build_models(
    recipe: Recipe, *, with_adapter: bool = True
) -> tuple[Transformer | Draft, dict[str, Transformer]]:
    """Build a recipe's trained model and its reference models, by role.

    Weights are random; call it on the meta device or under a fake-tensor mode. The adapter is
    attached only if `with_adapter`.
    """
    given = recipe.model
    others: dict[str, Transformer] = {}
    if given.target is not None:
        others["target"] = target = Transformer(load_config(resolve_metadata(given.target)))
        published = given.init and load_config(resolve_metadata(given.init))
        config = weights.check_draft_config(published or translate_config(given.config))
        model: Transformer | Draft = build_draft_model(config, target)
    elif given.init is None:
        model = Transformer(translate_config(given.config))
    else:
        folder = resolve_metadata(given.init)
        config = weights.change_config(load_config(folder), given.config, folder / CONFIG_FILE)
        model = Transformer(config)
    weights.check_trainable(model.config)
    weights.mark_trainable(model)
    if recipe.adapter is not None and with_adapter:
        lora.attach_adapter(model, recipe.adapter, recipe.train.seed)
    return model, others


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place; `Module.to` fails on fake tensors."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))


def resolve_metadata(name: str) -> Path:
    """Return the folder of a checkpoint without downloading its weights."""
    return resolve_checkpoint(name, METADATA_PATTERNS)


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


MATRIX_SIZE = 1024
"""Rows and columns of the timed matrix product."""

TIMED_TRIALS = 5
"""Number of timed products; the fastest counts."""


def describe_processor(plan: Plan) -> str:
    """Describe whether a run fits in this computer's memory, and a lower bound of its time.

    The time assumes that all operations run at the rate of a matrix product timed here.
    """
    available = memory_size()
    if available is None:
        fits = "a processor"
    else:
        verdict = (
            "is enough" if plan.device_bytes <= MAX_CARD_FRACTION * available else "is not enough"
        )
        fits = f"a processor whose {format_gib(available)} of memory {verdict}"
    rate = product_rate(torch.bfloat16 if plan.train.precision == "bf16" else torch.float32)
    seconds = plan.total_work / rate
    return (
        f"{fits}; at least {format_duration(seconds)} at {rate / 1e12:.2f} TFLOP per "
        "second, measured"
    )


def memory_size() -> int | None:
    """Return the bytes of memory of this computer; None if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def product_rate(dtype: torch.dtype) -> float:
    """Measure operations per second of a product of two square matrices, on all threads."""
    matrix = torch.full((MATRIX_SIZE, MATRIX_SIZE), 0.5, dtype=dtype)
    durations = []
    for _ in range(TIMED_TRIALS + 1):  # the first one warms up
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        durations.append(time.perf_counter() - began)
    return 2 * MATRIX_SIZE**3 / min(durations[1:])
