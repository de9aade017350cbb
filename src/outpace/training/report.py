"""Records of a run: provenance in `run.json`, metrics as JSON lines, and the terminal log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import accelerate
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from outpace.models.device import computes_bfloat16
from outpace.provenance import provenance_record
from outpace.training import checkpoint
from outpace.training.checkpoint import list_checkpoints
from outpace.training.trackers import flatten_settings, raise_write_errors, write_atomically

MetricSums = Mapping[str, tuple[Tensor, Tensor]]
"""Maps a metric's name to (sum, count)."""


class MetricAccumulator:
    """Metric sums of one process, reduced over all processes on demand."""

    def __init__(
        self, accelerator: Accelerator, initial: Mapping[str, tuple[float, float]]
    ) -> None:
        """Start from `initial`, sums over all processes such as those of a checkpoint."""
        self.accelerator = accelerator
        # Only the main process starts from them, so that the reduction counts them once.
        is_main = torch.tensor(float(accelerator.is_main_process), device=accelerator.device)
        self.sums = {name: [is_main * part for part in pair] for name, pair in initial.items()}

    def add(self, pairs: MetricSums) -> None:
        for name, pair in pairs.items():
            old = self.sums.get(name, [torch.zeros_like(part) for part in pair])
            self.sums[name] = [old[0] + pair[0], old[1] + pair[1]]

    def reduce_sums(self) -> dict[str, tuple[float, float]]:
        """Return the sums over all processes; a collective operation."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        flat = torch.stack([part for name in names for part in self.sums[name]])
        values = self.accelerator.reduce(flat, reduction="sum").view(-1, 2).tolist()
        return {name: (total, over) for name, (total, over) in zip(names, values, strict=True)}


def compute_means(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    quotients = {name: total / max(over, 1e-9) for name, (total, over) in sums.items()}
    if diverged := [name for name, value in quotients.items() if not math.isfinite(value)]:
        raise ValueError(
            f"{' and '.join(diverged)} became {quotients[diverged[0]]}: training has diverged; "
            "lower lr, raise warmup, or clip the gradient. No checkpoint of this step is saved"
        )
    return quotients


RUN_FILE, METRICS_FILE, HELD_OUT_FILE = "run.json", "metrics.jsonl", "held_out.jsonl"
RESUMABLE_SETTINGS = {
    *("out", "train.steps", "train.log_every", "train.save_every", "train.accumulation"),
    *("train.epochs", "train.recompute", "train.tracker", "train.balance", "data.features"),
}
"""Settings that may change when a run resumes, in addition to all of `held_out`."""


class TrainingReport:
    """Log lines, `metrics.jsonl`, and a progress bar in terminals.

    A context manager; the bar stops on exit.
    """

    def __init__(
        self,
        out: Path,
        accelerator: Accelerator,
        begun: checkpoint.TrainingProgress,
        steps: int,
        settings: Mapping[str, Any],
        parameters: int,
    ) -> None:
        """Write `run.json` and drop metrics of steps that will be repeated."""
        self.accelerator, self.first_step, self.steps = accelerator, begun.step, steps
        self.out, self.console = out, Console(highlight=False)
        self.loss = float("nan")
        self.start_time = self.last_write_time = time.perf_counter()
        self.sums = MetricAccumulator(accelerator, begun.sums)
        self.progress_bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.progress_task = self.progress_bar.add_task(
            "training", completed=begun.step, total=steps
        )
        if accelerator.is_main_process:
            device = accelerator.device
            is_gpu = device.type == "cuda"
            facts = {
                **provenance_record(),
                "accelerate": accelerate.__version__,
                "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
                "processes": accelerator.num_processes,
                "parameters": parameters,
                "settings": settings,
            }
            write_atomically(out / RUN_FILE, json.dumps(facts, indent=2) + "\n")
            truncate_log(out / METRICS_FILE, begun.step)
            truncate_log(out / HELD_OUT_FILE, begun.step)
            train = settings["train"]
            batch = f"{train['tokens']} tokens" if train["tokens"] else f"{train['batch']} examples"
            self.print_line(
                f"{parameters / 1e6:,.2f}M parameters, {steps} steps of {batch}, "
                f"{facts['device']}; settings in {out / RUN_FILE}"
            )
            if train["precision"] == "bf16" and not computes_bfloat16(device):
                self.print_line(
                    "this processor has no instructions for bfloat16; with train.precision=no a "
                    "step takes a small part of the time"
                )
            if begun.step:
                self.print_line(f"resuming after step {begun.step}")

    def __enter__(self) -> Self:
        if self.accelerator.is_main_process and self.console.is_terminal:
            self.progress_bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.progress_bar.live.is_started:
            self.progress_bar.stop()

    def add_step(
        self, total: Tensor, normaliser: Tensor, metrics: MetricSums, rows: int, tokens: int
    ) -> None:
        """Add the sums of one step of this process."""
        row_count, token_count = (
            torch.tensor(float(n), device=total.device) for n in (rows, tokens)
        )
        self.sums.add(
            {
                "loss": (total, normaliser),
                "rows": (row_count, row_count),
                "tokens": (token_count, token_count),
                **metrics,
            }
        )
        self.progress_bar.advance(self.progress_task)

    def write_metrics(self, step: int, rate: float) -> None:
        """Reduce the sums, write their means, and reset them."""
        sums = self.sums.reduce_sums()
        now = time.perf_counter()
        seconds, self.last_write_time = now - self.last_write_time, now
        speeds = {f"{name}_per_second": sums.pop(name)[0] / seconds for name in ("rows", "tokens")}
        found = compute_means(sums)
        self.loss, self.sums = found["loss"], MetricAccumulator(self.accelerator, {})
        left = (self.steps - step) * (now - self.start_time) / (step - self.first_step)
        if not self.accelerator.is_main_process:
            return
        line = {"step": step, **found, "lr": rate, **speeds}
        self.append_line(METRICS_FILE, {**line, "seconds": now - self.start_time})
        self.accelerator.log({name: line[name] for name in line if name != "step"}, step=step)
        speed = f"{speeds['tokens_per_second']:,.0f} tokens/s"
        self.progress_bar.update(self.progress_task, description=f"loss {self.loss:.4f}  {speed}")
        self.print_line(
            f"step {step}/{self.steps}  {format_figures(found)}  lr {rate:.2e}  {speed}  "
            f"{format_duration(left)} left"
        )

    def write_held_out(self, step: int, figures: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.append_line(HELD_OUT_FILE, {"step": step, **figures})
            named = {f"held_out/{name}": value for name, value in figures.items()}
            self.accelerator.log(named, step=step)
            self.print_line(f"held out, after step {step}  {format_figures(figures)}")

    def is_best(self, name: str) -> bool:
        """Return whether the last validation has the best figure of this name so far."""
        lines = [json.loads(line) for line in (self.out / HELD_OUT_FILE).read_text().splitlines()]
        if name not in lines[-1]:
            known = ", ".join(figure for figure in lines[-1] if figure != "step")
            raise ValueError(f"best must be a figure of a validation, {known}; got {name!r}")
        values = [line[name] for line in lines if name in line]
        best = min if name in ("loss", "divergence") else max
        return bool(values[-1] == best(values))

    def append_line(self, name: str, line: Mapping[str, Any]) -> None:
        with raise_write_errors(self.out / name), (self.out / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def print_line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def pending_sums(self) -> dict[str, tuple[float, float]]:
        """Return the sums since the last line, for a run that resumes here."""
        sums = self.sums.reduce_sums()
        compute_means(sums)
        # Rows and tokens only serve the speed, which restarts with the run.
        return {name: pair for name, pair in sums.items() if name not in ("rows", "tokens")}


def format_figures(figures: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in sorted(figures.items()))


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def check_run_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` if `out` is not a folder or holds a run with other settings."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, but {out} is a file; give another out")
    if not list_checkpoints(out / "checkpoints"):
        return
    try:
        before = flatten_settings(json.loads((out / RUN_FILE).read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{out / RUN_FILE} is missing or damaged, so the run in {out} cannot be identified; "
            "give another out, or delete that run"
        ) from error
    now = flatten_settings(json.loads(json.dumps(settings)))
    changed = [
        f"{key} {before[key]!r} (now {now[key]!r})"
        for key in sorted(before.keys() & now.keys() - RESUMABLE_SETTINGS)
        if before[key] != now[key] and not key.startswith("held_out.")
    ]
    if changed:
        raise ValueError(
            f"{out} holds a run with {', '.join(changed)}; give another out, or delete that run"
        )


def truncate_log(path: Path, step: int) -> None:
    if path.is_file():
        lines = path.read_text().splitlines()
        write_atomically(path, "".join(f"{line}\n" for line in lines if logged_step(line) <= step))


def logged_step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
