"""The loop: rows in, gradients averaged over processes, a checkpoint now and then."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from numpy.random import default_rng
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outpace.checkpoints.adapter import save_adapter
from outpace.checkpoints.load import load_model, load_tokenizer, save_model, tokenizer_folder
from outpace.models.draft import Draft
from outpace.models.transformer import Transformer
from outpace.training import checkpoint, interrupt, lora, report, trackers
from outpace.training.ahead import Ahead
from outpace.training.data import Data, Example, Examples, cut_data
from outpace.training.decoder import Decoder
from outpace.training.folder import alone, writing
from outpace.training.held_out import HeldOut, Watch
from outpace.training.kinds import check_values
from outpace.training.loop import Loop
from outpace.training.lora import LoRA
from outpace.training.objective import Models, Objective
from outpace.training.optim import Optim
from outpace.training.portions import Portions
from outpace.training.recompute import recompute
from outpace.training.report import Report
from outpace.training.rows import Rows, pack
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
    """Train one model on one objective; killed at any moment, it goes on from its checkpoint."""

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
        """Refuse what does not fit together, before any work.

        Args:
            model: a folder, a name, or a model in memory (then `tokenizer` names its folder).
            adapter: train low-rank updates instead of the weights; they are what is exported.
            others: models by role that the objective looks at and that are not trained; the
                target of a draft is the one that the draft was made with.
            source: what the provenance says of the model; its name or configuration by default.
            held_out: examples to look at while it trains.
            options: fields of `Loop` and `Optim`, by name.
        """
        self.loop, self.optim = with_options(loop or Loop(), optim or Optim(), options)
        if not isinstance(model, str) and tokenizer is None:
            raise ValueError("a model in memory needs tokenizer, the folder of its tokenizer")
        self.tokenizer = tokenizer_folder(str(model) if tokenizer is None else tokenizer)
        self.data = Data(path=data) if isinstance(data, str) else data
        self.model = load_model(model, plain=True) if isinstance(model, str) else model
        others = onlookers(objective, others or {})
        cut = cut_data(self.data, [known.config for known in (self.model, *others.values())])
        self.examples = Examples(cut, tokenizer_of(self.tokenizer), self.loop.seed)
        self.loop = self.loop.over(self.examples.epoch)
        self.objective = objective.bind(self.model.config)
        self.adapter, self.held_out, self.out = adapter, held_out, Path(out)
        named = {"init": model} if isinstance(model, str) else dict(self.model.config.source)
        self.settings = self.described(source or named)
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
        """The model with what it learns, its adapter attached."""
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
        """Train up to a number of steps; the loss of the last logged ones."""
        with alone(self.out) if self.accelerator.is_main_process else nullcontext():
            return self.go_on(steps or self.loop.steps)

    def go_on(self, steps: int) -> float:
        """Train from the last checkpoint on."""
        folder, say = self.out / "checkpoints", self.accelerator.print
        if self.store is not None:
            scored = self.accelerator.unwrap_model(self.scored)
            self.store.fill(scored, self.portion, self.accelerator, say)
        begun = checkpoint.restore(folder, self.model, self.optimizers, say)
        if begun.examples is not None:
            self.portions.begins[begun.step] = begun.examples
        size = sum(parameter.numel() for parameter in self.model.parameters())
        trackers.begin(self.accelerator, self.out, self.settings, begun.step)
        recorded = Report(self.out, self.accelerator, begun, steps, self.settings, size)
        with recorded as log, interrupt.held(say) as signalled:
            if not begun.step:
                self.look(0, steps, log)
            for step in range(begun.step, steps):
                log.add(*self.update(step, steps))
                if (step + 1) % self.loop.log_every == 0 or step + 1 == steps:
                    log.write(step + 1, self.optim.rate(step, steps))
                self.look(step + 1, steps, log)
                stopped = self.anywhere(signalled() != 0)
                if stopped or (step + 1) % self.loop.save_every == 0 or step + 1 == steps:
                    learnt = self.portions.begin(step + 1)
                    self.save(folder, checkpoint.Progress(step + 1, log.pending(), learnt))
                if stopped and step + 1 < steps:
                    say(f"stopped after step {step + 1}; the same command goes on from {folder}")
                    raise interrupt.ended(signalled())
        return log.loss

    def save(self, folder: Path, progress: checkpoint.Progress) -> None:
        """Write a checkpoint, each process its own part where they share out what is trained."""
        together = self.accelerator if self.sharded else None
        if self.accelerator.is_main_process or self.sharded:
            checkpoint.save(folder, self.model, self.optimizers, progress, together)
        self.accelerator.wait_for_everyone()

    def anywhere(self, pressed: bool) -> bool:
        """Whether any process was interrupted, so that all stop after the same step."""
        if self.accelerator.num_processes == 1:
            return pressed
        mine = torch.tensor(float(pressed), device=self.accelerator.device)
        return bool(self.accelerator.reduce(mine, reduction="sum") > 0)

    def look(self, step: int, steps: int, log: Report) -> None:
        """Look at the held-out examples, where it is their turn."""
        if self.watch and (step % self.watch.settings.every == 0 or step == steps):
            scored = self.accelerator.unwrap_model(self.scored)
            log.held_out(step, self.watch.look(scored, self.portion, self.write, self.out))
            self.accelerator.wait_for_everyone()

    def stored(self, folder: str, others: Mapping[str, Transformer]) -> Store:
        """Where features of the target are kept."""
        reading = self.objective.reading(self.model.config)
        target, precision = others.get("target"), self.loop.precision
        return Store(folder, self.examples, reading, target, precision)

    def watcher(self, held_out: HeldOut, data: Data) -> Watch:
        """What looks at held-out examples, all of them checked."""
        examples = held_out.opened(data, self.examples.tokenizer, self.loop.seed)
        examples.check()
        decoder = self.decoder(held_out.method)
        length = self.model.config.max_length
        return Watch(held_out, examples, self.objective, decoder, self.accelerator, length)

    def decoder(self, method: Mapping[str, Any]) -> Decoder | None:
        """What decodes an export; None where it needs a model that has no name."""
        named = self.settings["model"]
        usual = {} if self.objective.method is None else {"name": self.objective.method}
        if isinstance(self.model, Draft):
            target = named.get("target")
            return target and Decoder(method=method or usual, target=target)
        if self.adapter:
            base = None if named.get("config") else named.get("init")
            return base and Decoder(method=method or usual, base=base)
        return Decoder(method=method or usual)

    def export(self, folder: str | Path) -> None:
        """Write the model in its published format, with its tokenizer (a draft has none)."""
        self.write(Path(folder))
        self.accelerator.wait_for_everyone()

    def write(self, folder: Path) -> None:
        """Export from the first process; all of them hand over what they keep."""
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
        """Where an export lies, and the command that decodes it."""
        method = {} if self.held_out is None else self.held_out.method
        decoder = self.decoder(method)
        if decoder is None:
            return f"the model lies in {folder}"
        asked = self.examples.question() or "What is 17 + 25?"
        return f"the model lies in {folder}; decode with it:\n{decoder.command(folder, asked)}"

    def close(self) -> None:
        """Leave the group of processes, and make no more data."""
        self.ahead.close()
        self.accelerator.end_training()

    def update(self, step: int, steps: int) -> tuple[Tensor, Tensor, dict[str, Any], int, int]:
        """One update; the summed loss, its mass, metrics, rows and tokens of this process."""
        rate = self.optim.rate(step, steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        batches, tokens = self.ahead(step, last=step + 1 == steps)
        mass = torch.tensor(sum(rows.mass for rows in batches), device=self.accelerator.device)
        everyone = self.accelerator.reduce(mass.clone(), reduction="mean")
        total = torch.zeros((), device=self.accelerator.device)
        metrics: dict[str, Any] = {}
        for rows in batches[:-1]:
            with self.accelerator.no_sync(self.scored):
                total += self.backward(rows, everyone, metrics)
        total += self.backward(batches[-1], everyone, metrics)
        if self.optim.clip:
            clip = self.accelerator.clip_grad_norm_
            norm = whole(clip(self.model.parameters(), self.optim.clip))
            metrics["gradient"] = norm.detach(), torch.ones_like(norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total, mass, metrics, sum(len(rows) for rows in batches), tokens

    def backward(self, rows: Rows, mass: Tensor, metrics: dict[str, Any]) -> Tensor:
        """Add the gradient of one portion; its summed loss."""
        # Gradients are averaged over processes, so dividing by the mean mass gives one big batch's.
        loss: Tensor
        loss, parts = self.scored(rows.to(self.accelerator.device))
        self.accelerator.backward(loss / mass)
        for name, (value, count) in parts.items():
            old = metrics.get(name, (0.0, 0.0))
            metrics[name] = old[0] + value.detach(), old[1] + count
        return loss.detach()

    def batches(self, step: int) -> tuple[list[Rows], int]:
        """The rows of this process in a step, and the tokens that they are of.

        They are a function of the seed, the step and its rank.
        """
        portions = self.portions.of(step, self.accelerator.process_index)
        tokens = sum(len(example) for portion in portions for _, example in portion)
        return [pack([self.rows(*each) for each in portion]) for portion in portions], tokens

    def rows(self, number: int, example: Example) -> Rows:
        """What is fed of an example."""
        rows = self.objective.rows(example, default_rng([self.loop.seed, number, 2]))
        return rows if self.store is None else self.store.added(rows, number, example)

    def described(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """All that decides the run, for the log, the provenance and the check of a resume."""
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


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; `ValueError` where there is none."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer.json; give tokenizer, a folder that has one")
    return tokenizer


def onlookers(objective: Objective, others: Mapping[str, Transformer]) -> dict[str, Transformer]:
    """The models that only look on; `ValueError` unless they are those that the objective needs."""
    if set(others) != set(objective.roles):
        raise ValueError(
            f"{type(objective).__name__} looks at {', '.join(objective.roles) or 'no other model'}"
            f", but {', '.join(sorted(others)) or 'no other model'} is given"
        )
    return dict(others)


def with_options(loop: Loop, optim: Optim, options: Mapping[str, Any]) -> tuple[Loop, Optim]:
    """The settings with the fields that options name changed."""
    known: Sequence[str] = [*asdict(loop), *asdict(optim)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"unknown options {', '.join(unknown)}; known are {', '.join(known)}")
    for part in (loop, optim):
        kind = type(part)
        own = {name: value for name, value in options.items() if hasattr(part, name)}
        check_values(kind.__name__, kind, own)
    return (
        replace(loop, **{k: v for k, v in options.items() if hasattr(loop, k)}),
        replace(optim, **{k: v for k, v in options.items() if hasattr(optim, k)}),
    )


def new_accelerator(tracker: str | None, out: Path) -> Accelerator:
    """What runs the processes, on the device that there is, and logs for a tracker."""
    kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=cpu, kwargs_handlers=[kwargs], log_with=tracker, project_dir=str(out)
    )
    if accelerator.num_processes > 1 and cpu:
        # Threads of several processes would wait for one another at every operation.
        torch.set_num_threads(1)
    return accelerator
