"""The training loop: batches, gradient accumulation, checkpoints, validation and export."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch.utils.checkpoint
from numpy.random import default_rng
from torch import Tensor

from outpace.checkpoints.adapter import save_adapter
from outpace.checkpoints.checkpoint import Checkpoint, write_tokenizer
from outpace.checkpoints.load import load_config, load_model, save_model
from outpace.models.draft import Draft
from outpace.models.transformer import Transformer
from outpace.training import checkpoint, lora, report, trackers, weights
from outpace.training.data import Data, Example, Examples, check_origin, limit_length
from outpace.training.held_out import ExportDecoder, HeldOut, Validator
from outpace.training.loop import Loop
from outpace.training.lora import LoRA
from outpace.training.micro_batches import MicroBatches
from outpace.training.objective import LossModule, Models, Objective, build_teachers
from outpace.training.optim import Optim
from outpace.training.report import TrainingReport
from outpace.training.rows import Rows, pack_documents
from outpace.training.run_setup import (
    apply_options,
    check_reference_models,
    create_accelerator,
    require_tokenizer,
)
from outpace.training.shard import full_tensor, gather_tensors, prepare_training
from outpace.training.store import FeatureStore
from outpace.training.trackers import lock_folder, raise_write_errors

SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which two signals count as one: a launcher may forward the terminal's signal."""

DEFAULT_HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
}
"""Signals that end a run, with Python's default handlers."""


@contextmanager
def catch_signals(print_line: Callable[[str], None] = print) -> Iterator[Callable[[], int]]:
    """Record the first signal that would end the run; a second one ends it.

    Yields:
        A function that returns the number of the recorded signal, 0 if there is none.
    """
    # Only default handlers are replaced, and only in the main thread: ignored signals (`nohup`) and
    # foreign handlers are left alone.
    received, received_at = 0, 0.0

    def handle_signal(number: int, frame: Any) -> None:
        nonlocal received, received_at
        if not received:
            received, received_at = number, time.monotonic()
            again = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            print_line(
                f"stopping after this step; {again} again stops at once, without a checkpoint"
            )
        elif time.monotonic() - received_at > SAME_SIGNAL_SECONDS:
            raise exit_exception(number)

    replaced = {
        number: default
        for number, default in DEFAULT_HANDLERS.items()
        if signal.getsignal(number) is default
    }
    if current_thread() is not main_thread():
        replaced = {}
    for number in replaced:
        signal.signal(number, handle_signal)
    try:
        yield lambda: received
    finally:
        for number, default in replaced.items():
            signal.signal(number, default)


def exit_exception(number: int) -> BaseException:
    stops = number in (0, signal.SIGINT)
    return KeyboardInterrupt() if stops else SystemExit(128 + number)


class Prefetcher:
    """Calls a function of the step number one step ahead, in a separate thread.

    Its exceptions are raised when the result is requested.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.compute = make
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="outpace-data")
        self.pending: tuple[int, Future[Any]] | None = None

    def __call__(self, step: int, *, last: bool = False) -> Any:
        """Return the result of a step; unless it is the `last` one, start computing the next."""
        number, future = self.pending or (None, None)
        if future is None or number != step:
            future = self.pool.submit(self.compute, step)
        result = future.result()
        self.pending = None if last else (step + 1, self.pool.submit(self.compute, step + 1))
        return result

    def close(self) -> None:
        """Wait for the running computation, and stop the thread."""
        self.pool.shutdown(cancel_futures=True)


BEST_FOLDER = "best"
"""Subfolder of a run for the export with the best held-out figure."""


class Trainer:
    """Trains one model on one objective; an interrupted run resumes from its last checkpoint.

    Args:
        model: a folder, a name, or a model in memory; the latter needs `tokenizer`.
        objective, data, out: objective, training data or its path, and folder of the run.
        tokenizer: folder or name of the tokenizer; that of `model` by default.
        optim, loop: settings of the optimizer and the training loop.
        adapter: train and export low-rank updates instead of the weights.
        others: frozen reference models of the objective, by role; a draft needs the target
            it was built with.
        source: the model's entry in the provenance; its name or configuration by default.
        held_out: examples for validation during training.
        options: fields of `Loop` and `Optim`, by name.

    Raises:
        ValueError: settings, models or data are invalid or do not fit together.
    """

    def __init__(
        self,
        model: str | Transformer | Draft,
        objective: Objective,
        *,
        data: str | Data,
        out: str | Path,
        tokenizer: str | Path | None = None,
        optim: Optim | None = None,
        loop: Loop | None = None,
        adapter: LoRA | None = None,
        others: Mapping[str, Transformer] | None = None,
        source: Mapping[str, Any] | None = None,
        held_out: HeldOut | None = None,
        **options: Any,
    ) -> None:
        """Check that models, objective and data are compatible, and prepare the run."""
        self.loop, self.optim = apply_options(loop or Loop(), optim or Optim(), options)
        if not isinstance(model, str) and tokenizer is None:
            raise ValueError("tokenizer is required for a model in memory; give its folder")
        self.tokenizer = Checkpoint(str(model) if tokenizer is None else tokenizer).tokenizer_folder
        self.data = Data(path=data) if isinstance(data, str) else data
        self.model = load_model(model, plain=True) if isinstance(model, str) else model
        others = check_reference_models(objective, self.model, others or {})
        cut = limit_length(self.data, [each.config for each in (self.model, *others.values())])
        self.examples = Examples(cut, require_tokenizer(self.tokenizer), self.loop.seed)
        self.loop = self.loop.with_epochs(self.examples.epoch_size)
        self.objective = objective.bind(self.model.config)
        self.adapter, self.held_out, self.out = adapter, held_out, Path(out)
        origin = {"init": model} if isinstance(model, str) else dict(self.model.config.source)
        self.settings = self.describe_run(source or origin)
        report.check_run_settings(self.out, self.settings)
        self.accelerator = create_accelerator(self.loop.tracker, self.out)
        count = self.accelerator.num_processes
        self.micro_batch_size = self.loop.micro_batch_size(count, cut.longest)
        self.examples.check_records()
        self.check_origin(self.examples)
        self.validator = None if held_out is None else self.build_validator(held_out, cut)
        self.feature_store: FeatureStore | None = None
        if cut.features is not None:
            reading = self.objective.feature_spec(self.model.config)
            self.feature_store = FeatureStore(
                cut.features, self.examples, reading, others.get("target"), self.loop.precision
            )
        scored = self.build_loss_module(others)
        self.micro_batches = MicroBatches(self.loop, count, self.examples.__getitem__)
        self.prefetcher = Prefetcher(self.build_batches)
        self.is_sharded = self.loop.shard and count > 1
        self.loss_module, *self.optimizers = prepare_training(
            scored, self.optim, self.accelerator, sharded=self.is_sharded
        )

    def build_loss_module(self, others: Mapping[str, Transformer]) -> LossModule:
        taught = build_teachers(self.objective, self.model, self.adapter is not None)
        if self.adapter is None:
            weights.mark_trainable(self.model)
        else:
            lora.attach_adapter(self.model, self.adapter, self.loop.seed)
            if self.adapter.init is not None:
                lora.restore_updates(self.model, self.adapter.init)
                for teacher in taught.values():
                    lora.attach_adapter(teacher, self.adapter).eval()
                    lora.restore_updates(teacher.requires_grad_(False), self.adapter.init)
        if self.loop.recompute:
            for block in self.model.blocks:
                # Set on the instance, so that parameters keep their names.
                block.forward = partial(
                    torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False
                )
        models = Models(self.model.train(), {**taught, **others})
        return LossModule(self.objective, models, self.loop.precision)

    def fit(self, steps: int | None = None) -> float:
        """Train up to `steps` steps; return the mean loss over the last logging interval."""
        with lock_folder(self.out) if self.accelerator.is_main_process else nullcontext():
            return self.resume_training(steps or self.loop.steps)

    def resume_training(self, steps: int) -> float:
        folder, print_line = self.out / "checkpoints", self.accelerator.print
        if self.feature_store is not None:
            scored = self.accelerator.unwrap_model(self.loss_module)
            self.feature_store.compute_missing(
                scored, self.micro_batch_size, self.accelerator, print_line
            )
        begun = checkpoint.restore_latest(folder, self.model, self.optimizers, print_line)
        if begun.examples is not None:
            self.micro_batches.first_examples[begun.step] = begun.examples
        size = sum(parameter.numel() for parameter in self.model.parameters())
        trackers.start_tracker(self.accelerator, self.out, self.settings, begun.step)
        log_files = TrainingReport(self.out, self.accelerator, begun, steps, self.settings, size)
        with log_files as log, catch_signals(print_line) as received_signal:
            if not begun.step:
                self.validate_model(0, steps, log)
            for step in range(begun.step, steps):
                log.add_step(*self.train_step(step, steps))
                if (step + 1) % self.loop.log_every == 0 or step + 1 == steps:
                    log.write_metrics(step + 1, self.optim.learning_rate(step, steps))
                self.validate_model(step + 1, steps, log)
                # All processes end after the same step, whichever of them received the signal.
                stopped = self.any_process(received_signal() != 0)
                if stopped or (step + 1) % self.loop.save_every == 0 or step + 1 == steps:
                    next_example = self.micro_batches.first_example(step + 1)
                    progress = checkpoint.TrainingProgress(
                        step + 1, log.pending_sums(), next_example
                    )
                    self.save_checkpoint(folder, progress)
                if stopped and step + 1 < steps:
                    print_line(
                        f"stopped after step {step + 1}; the same command resumes from {folder}"
                    )
                    raise exit_exception(received_signal())
        return log.loss

    def save_checkpoint(self, folder: Path, progress: checkpoint.TrainingProgress) -> None:
        together = self.accelerator if self.is_sharded else None
        if self.accelerator.is_main_process or self.is_sharded:
            checkpoint.save_checkpoint(folder, self.model, self.optimizers, progress, together)
        self.accelerator.wait_for_everyone()

    def any_process(self, local: bool) -> bool:
        """Return whether `local` is true in any process, so that all stop after the same step."""
        if self.accelerator.num_processes == 1:
            return local
        flag = torch.tensor(float(local), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def validate_model(self, step: int, steps: int, log: TrainingReport) -> None:
        if self.validator and (step % self.validator.settings.every == 0 or step == steps):
            scored = self.accelerator.unwrap_model(self.loss_module)
            log.write_held_out(
                step,
                self.validator.validate(scored, self.micro_batch_size, self.write_export, self.out),
            )
            if (best := self.validator.settings.best) is not None:
                main = self.accelerator.is_main_process
                if self.any_process(main and log.is_best(best)):
                    self.write_export(self.out / BEST_FOLDER)
            self.accelerator.wait_for_everyone()

    def check_origin(self, examples: Examples) -> None:
        """Raise `ValueError` if a draft's examples were made by another model than its target."""
        if isinstance(self.model, Draft) and (target := self.settings["model"].get("target")):
            check_origin(examples, target)

    def build_validator(self, held_out: HeldOut, data: Data) -> Validator:
        examples = held_out.load_examples(data, self.examples.tokenizer, self.loop.seed)
        examples.check_records()
        self.check_origin(examples)
        decoder = self.build_decoder(held_out.method)
        length = self.model.config.max_length
        return Validator(held_out, examples, self.objective, decoder, self.accelerator, length)

    def build_decoder(self, method: Mapping[str, Any]) -> ExportDecoder | None:
        """Build the decoder of exports; None if its target or base has no name to load it by."""
        origin = self.settings["model"]
        default = {} if self.objective.method is None else {"name": self.objective.method}
        if isinstance(self.model, Draft):
            target = origin.get("target")
            return target and ExportDecoder(method=method or default, target=target)
        if self.adapter:
            base = origin.get("init")
            if origin.get("config") and self.model.config.shift < load_config(base).shift:
                return None  # the export is of a base whose queries were rotated
            return base and ExportDecoder(method=method or default, base=base)
        return ExportDecoder(method=method or default)

    def export(self, folder: str | Path) -> None:
        """Write the model in its published format, with its tokenizer unless it is a draft."""
        self.write_export(Path(folder))
        self.accelerator.wait_for_everyone()

    def write_export(self, folder: Path) -> None:
        main, model = self.accelerator.is_main_process, self.model
        wanted = checkpoint.trainable_parameters(model) if self.adapter else model.state_dict()
        tensors = gather_tensors(wanted, keep=main)
        if not main:
            return
        with raise_write_errors(folder):
            if self.adapter is None:
                save_model(self.model, folder, parameters=tensors)
            else:
                config = self.adapter.adapter_config(self.model, self.settings["model"])
                dtype = next(model.parameters()).dtype  # of the weights that updates are added to
                own = {name: tensor.to(dtype) for name, tensor in tensors.items()}
                save_adapter(folder, lora.collect_updates(self.model, own), config)
            if isinstance(self.model, Transformer):
                write_tokenizer(self.tokenizer, folder)

    def export_summary(self, folder: Path) -> str:
        """Return where an export is stored, and the command that decodes with it."""
        method = {} if self.held_out is None else self.held_out.method
        decoder = self.build_decoder(method)
        if decoder is None:
            return f"the model is in {folder}"
        prompt = self.examples.first_question() or "What is 17 + 25?"
        return f"the model is in {folder}; decode with it:\n{decoder.build_command(folder, prompt)}"

    def close(self) -> None:
        """Stop prefetching, and leave the process group."""
        self.prefetcher.close()
        self.accelerator.end_training()

    def train_step(self, step: int, steps: int) -> tuple[Tensor, Tensor, dict[str, Any], int, int]:
        rate = self.optim.learning_rate(step, steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        batches, tokens = self.prefetcher(step, last=step + 1 == steps)
        normaliser = torch.tensor(
            sum(rows.normaliser for rows in batches), device=self.accelerator.device
        )
        mean_normaliser = self.accelerator.reduce(normaliser.clone(), reduction="mean")
        total = torch.zeros((), device=self.accelerator.device)
        metrics: dict[str, Any] = {}
        for rows in batches[:-1]:
            with self.accelerator.no_sync(self.loss_module):
                total += self.backward_micro_batch(rows, mean_normaliser, metrics)
        total += self.backward_micro_batch(batches[-1], mean_normaliser, metrics)
        if self.optim.clip:
            clip = self.accelerator.clip_grad_norm_
            norm = full_tensor(clip(self.model.parameters(), self.optim.clip))
            metrics["gradient"] = norm.detach(), torch.ones_like(norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total, normaliser, metrics, sum(len(rows) for rows in batches), tokens

    def backward_micro_batch(
        self, rows: Rows, normaliser: Tensor, metrics: dict[str, Any]
    ) -> Tensor:
        # Gradients are averaged over processes; the mean normaliser gives those of one big batch.
        loss: Tensor
        loss, parts = self.loss_module(rows.to(self.accelerator.device))
        self.accelerator.backward(loss / normaliser)
        for name, (value, count) in parts.items():
            old = metrics.get(name, (0.0, 0.0))
            metrics[name] = old[0] + value.detach(), old[1] + count
        return loss.detach()

    def build_batches(self, step: int) -> tuple[list[Rows], int]:
        micro_batches = self.micro_batches.micro_batches(step, self.accelerator.process_index)
        tokens = sum(len(example) for part in micro_batches for _, example in part)
        return [
            pack_documents([self.example_rows(*each) for each in part]) for part in micro_batches
        ], tokens

    def example_rows(self, number: int, example: Example) -> Rows:
        rows = self.objective.rows(example, default_rng([self.loop.seed, number, 2]))
        return (
            rows
            if self.feature_store is None
            else self.feature_store.add_features(rows, number, example)
        )

    def describe_run(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings of the run, for trackers, provenance and the check on resuming."""
        return {
            "model": dict(model),
            "objective": {"name": type(self.objective).__name__.lower(), **asdict(self.objective)},
            "data": asdict(self.data),
            "optim": asdict(self.optim),
            "train": asdict(self.loop),
            "adapter": None if self.adapter is None else asdict(self.adapter),
            "held_out": None if self.held_out is None else asdict(self.held_out),
            "out": str(self.out),
        }
