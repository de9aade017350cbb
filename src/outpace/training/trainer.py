"""The training loop: batches, gradient accumulation, checkpoints, validation and export."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from numpy.random import default_rng
from torch import Tensor

from outpace.checkpoints.adapter import save_adapter
from outpace.checkpoints.load import load_model, save_model, tokenizer_folder
from outpace.models.draft import Draft
from outpace.models.transformer import Transformer
from outpace.training import checkpoint, interrupt, lora, report, trackers
from outpace.training.ahead import Ahead
from outpace.training.data import Data, Example, Examples, cut_data
from outpace.training.decoder import Decoder
from outpace.training.folder import alone, writing
from outpace.training.held_out import HeldOut, Watch
from outpace.training.loop import Loop
from outpace.training.lora import LoRA
from outpace.training.objective import Models, Objective
from outpace.training.optim import Optim
from outpace.training.portions import Portions
from outpace.training.recompute import recompute
from outpace.training.report import Report
from outpace.training.rows import Rows, pack
from outpace.training.run_setup import new_accelerator, onlookers, tokenizer_of, with_options
from outpace.training.scored import Scored, teachers
from outpace.training.shard import gathered, prepared, whole
from outpace.training.store import Store

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


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
        self.loop, self.optim = with_options(loop or Loop(), optim or Optim(), options)
        if not isinstance(model, str) and tokenizer is None:
            raise ValueError("tokenizer is required for a model in memory; give its folder")
        self.tokenizer = tokenizer_folder(str(model) if tokenizer is None else tokenizer)
        self.data = Data(path=data) if isinstance(data, str) else data
        self.model = load_model(model, plain=True) if isinstance(model, str) else model
        others = onlookers(objective, others or {})
        cut = cut_data(self.data, [each.config for each in (self.model, *others.values())])
        self.examples = Examples(cut, tokenizer_of(self.tokenizer), self.loop.seed)
        self.loop = self.loop.over(self.examples.epoch)
        self.objective = objective.bind(self.model.config)
        self.adapter, self.held_out, self.out = adapter, held_out, Path(out)
        origin = {"init": model} if isinstance(model, str) else dict(self.model.config.source)
        self.settings = self.described(source or origin)
        report.refuse_other(self.out, self.settings)
        self.accelerator = new_accelerator(self.loop.tracker, self.out)
        count = self.accelerator.num_processes
        self.portion = self.loop.share(count, cut.longest)
        main = self.accelerator.is_main_process
        self.examples.check(report.watched if main else lambda lines, count: lines)
        self.watch = None if held_out is None else self.watcher(held_out, cut)
        self.store = None if cut.features is None else self.stored(cut.features, others)
        scored = self.scoring(others)
        self.portions = Portions(self.loop, count, self.examples.__getitem__)
        self.ahead = Ahead(self.batches)
        self.sharded = self.loop.shard and count > 1
        self.scored, *self.optimizers = prepared(
            scored, self.optim, self.accelerator, shared=self.sharded
        )

    def scoring(self, others: Mapping[str, Transformer]) -> Scored:
        """Build the loss module, with the adapter attached and teachers copied."""
        taught = teachers(self.objective, self.model, self.adapter is not None)
        if self.adapter is None:
            self.model.requires_grad_(True)
        else:
            lora.attach(self.model, self.adapter, self.loop.seed)
        if self.loop.recompute:
            recompute(self.model)
        models = Models(self.model.train(), {**taught, **others})
        return Scored(self.objective, models, self.loop.precision)

    def fit(self, steps: int | None = None) -> float:
        """Train up to `steps` steps; return the mean loss over the last logging interval."""
        with alone(self.out) if self.accelerator.is_main_process else nullcontext():
            return self.go_on(steps or self.loop.steps)

    def go_on(self, steps: int) -> float:
        """Train from the last checkpoint."""
        folder, say = self.out / "checkpoints", self.accelerator.print
        if self.store is not None:
            scored = self.accelerator.unwrap_model(self.scored)
            self.store.fill(scored, self.portion, self.accelerator, say)
        begun = checkpoint.restore(folder, self.model, self.optimizers, say)
        if begun.examples is not None:
            self.portions.begins[begun.step] = begun.examples
        size = sum(parameter.numel() for parameter in self.model.parameters())
        trackers.begin(self.accelerator, self.out, self.settings, begun.step)
        log_files = Report(self.out, self.accelerator, begun, steps, self.settings, size)
        with log_files as log, interrupt.held(say) as received_signal:
            if not begun.step:
                self.look(0, steps, log)
            for step in range(begun.step, steps):
                log.add(*self.update(step, steps))
                if (step + 1) % self.loop.log_every == 0 or step + 1 == steps:
                    log.write(step + 1, self.optim.rate(step, steps))
                self.look(step + 1, steps, log)
                stopped = self.anywhere(received_signal() != 0)
                if stopped or (step + 1) % self.loop.save_every == 0 or step + 1 == steps:
                    next_example = self.portions.begin(step + 1)
                    progress = checkpoint.Progress(step + 1, log.pending(), next_example)
                    self.save(folder, progress)
                if stopped and step + 1 < steps:
                    say(f"stopped after step {step + 1}; the same command resumes from {folder}")
                    raise interrupt.ended(received_signal())
        return log.loss

    def save(self, folder: Path, progress: checkpoint.Progress) -> None:
        """Write a checkpoint; in sharded runs each process writes its part."""
        together = self.accelerator if self.sharded else None
        if self.accelerator.is_main_process or self.sharded:
            checkpoint.save(folder, self.model, self.optimizers, progress, together)
        self.accelerator.wait_for_everyone()

    def anywhere(self, local: bool) -> bool:
        """Return whether `local` is true in any process, so that all stop after the same step."""
        if self.accelerator.num_processes == 1:
            return local
        flag = torch.tensor(float(local), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum") > 0)

    def look(self, step: int, steps: int, log: Report) -> None:
        """Validate the model if a validation is due at this step."""
        if self.watch and (step % self.watch.settings.every == 0 or step == steps):
            scored = self.accelerator.unwrap_model(self.scored)
            log.held_out(step, self.watch.look(scored, self.portion, self.write, self.out))
            self.accelerator.wait_for_everyone()

    def stored(self, folder: str, others: Mapping[str, Transformer]) -> Store:
        """Open the store of target features."""
        reading = self.objective.reading(self.model.config)
        target, precision = others.get("target"), self.loop.precision
        return Store(folder, self.examples, reading, target, precision)

    def watcher(self, held_out: HeldOut, data: Data) -> Watch:
        """Build the validator, after checking its data."""
        examples = held_out.opened(data, self.examples.tokenizer, self.loop.seed)
        examples.check()
        decoder = self.decoder(held_out.method)
        length = self.model.config.max_length
        return Watch(held_out, examples, self.objective, decoder, self.accelerator, length)

    def decoder(self, method: Mapping[str, Any]) -> Decoder | None:
        """Build the decoder of exports; None if its target or base has no name to load it by."""
        origin = self.settings["model"]
        default = {} if self.objective.method is None else {"name": self.objective.method}
        if isinstance(self.model, Draft):
            target = origin.get("target")
            return target and Decoder(method=method or default, target=target)
        if self.adapter:
            base = None if origin.get("config") else origin.get("init")
            return base and Decoder(method=method or default, base=base)
        return Decoder(method=method or default)

    def export(self, folder: str | Path) -> None:
        """Write the model in its published format, with its tokenizer unless it is a draft."""
        self.write(Path(folder))
        self.accelerator.wait_for_everyone()

    def write(self, folder: Path) -> None:
        """Write an export from the main process; a collective operation in sharded runs."""
        tensors = gathered(checkpoint.trained(self.model), keep=self.accelerator.is_main_process)
        if not self.accelerator.is_main_process:
            return
        with writing(folder):
            if self.adapter is None:
                save_model(self.model, folder, given={**self.model.state_dict(), **tensors})
            else:
                config = self.adapter.config(self.model, self.settings["model"].get("init"))
                save_adapter(folder, lora.updates(self.model, tensors), config)
            for name in TOKENIZER_FILES if isinstance(self.model, Transformer) else ():
                if (self.tokenizer / name).is_file():
                    shutil.copyfile(self.tokenizer / name, folder / name)

    def epilogue(self, folder: Path) -> str:
        """Return where an export is stored, and the command that decodes with it."""
        method = {} if self.held_out is None else self.held_out.method
        decoder = self.decoder(method)
        if decoder is None:
            return f"the model is in {folder}"
        prompt = self.examples.question() or "What is 17 + 25?"
        return f"the model is in {folder}; decode with it:\n{decoder.command(folder, prompt)}"

    def close(self) -> None:
        """Stop prefetching, and leave the process group."""
        self.ahead.close()
        self.accelerator.end_training()

    def update(self, step: int, steps: int) -> tuple[Tensor, Tensor, dict[str, Any], int, int]:
        """Update the weights; return loss, normaliser, metrics, rows and tokens of this process."""
        rate = self.optim.rate(step, steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        batches, tokens = self.ahead(step, last=step + 1 == steps)
        mass = torch.tensor(sum(rows.mass for rows in batches), device=self.accelerator.device)
        mean_mass = self.accelerator.reduce(mass.clone(), reduction="mean")
        total = torch.zeros((), device=self.accelerator.device)
        metrics: dict[str, Any] = {}
        for rows in batches[:-1]:
            with self.accelerator.no_sync(self.scored):
                total += self.backward(rows, mean_mass, metrics)
        total += self.backward(batches[-1], mean_mass, metrics)
        if self.optim.clip:
            clip = self.accelerator.clip_grad_norm_
            norm = whole(clip(self.model.parameters(), self.optim.clip))
            metrics["gradient"] = norm.detach(), torch.ones_like(norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total, mass, metrics, sum(len(rows) for rows in batches), tokens

    def backward(self, rows: Rows, mass: Tensor, metrics: dict[str, Any]) -> Tensor:
        """Accumulate the gradient of one micro-batch; return its summed loss."""
        # Gradients are averaged over processes; the mean normaliser gives those of one big batch.
        loss: Tensor
        loss, parts = self.scored(rows.to(self.accelerator.device))
        self.accelerator.backward(loss / mass)
        for name, (value, count) in parts.items():
            old = metrics.get(name, (0.0, 0.0))
            metrics[name] = old[0] + value.detach(), old[1] + count
        return loss.detach()

    def batches(self, step: int) -> tuple[list[Rows], int]:
        """Return this process's micro-batches of a step, and the tokens of their examples."""
        portions = self.portions.of(step, self.accelerator.process_index)
        tokens = sum(len(example) for portion in portions for _, example in portion)
        return [pack([self.rows(*each) for each in portion]) for portion in portions], tokens

    def rows(self, number: int, example: Example) -> Rows:
        """Return the rows of an example, with stored features if there are any."""
        rows = self.objective.rows(example, default_rng([self.loop.seed, number, 2]))
        return rows if self.store is None else self.store.added(rows, number, example)

    def described(self, model: Mapping[str, Any]) -> dict[str, Any]:
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
