"""Records of a run: provenance in `run.json`, metrics as JSON lines, and the terminal log."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import accelerate
import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    track,
)
from torch import Tensor

from outpace.provenance import provenance
from outpace.training import checkpoint
from outpace.training.checkpoint import checkpoints
from outpace.training.folder import write_whole, writing
from outpace.training.sums import Pairs, Sums, means
from outpace.training.trackers import leaves

RUN, METRICS, HELD = "run.json", "metrics.jsonl", "held_out.jsonl"
FREE = {
    *("out", "train.steps", "train.log_every", "train.save_every", "train.accumulation"),
    *("train.epochs", "train.recompute", "train.tracker", "train.balance", "data.features"),
}
"""Settings that may change when a run resumes, in addition to all of `held_out`."""

MANY = 20_000
"""Lines of data from which a check shows a progress bar."""

Item = TypeVar("Item")


def watched(lines: Iterable[Item], count: int) -> Iterable[Item]:
    """Wrap lines in a progress bar if there are many and the output is a terminal."""
    console = Console()
    if count < MANY or not console.is_terminal:
        return lines
    return track(lines, "checking the data", total=count, console=console, transient=True)


class Report:
    """Log lines, `metrics.jsonl`, and a progress bar in terminals.

    A context manager; the bar stops on exit.
    """

    def __init__(
        self,
        out: Path,
        accelerator: Accelerator,
        begun: checkpoint.Progress,
        steps: int,
        settings: Mapping[str, Any],
        parameters: int,
    ) -> None:
        """Write `run.json` and drop metrics of steps that will be repeated."""
        self.accelerator, self.first, self.steps = accelerator, begun.step, steps
        self.out, self.console = out, Console(highlight=False)
        self.loss = float("nan")
        self.begun = self.since = time.perf_counter()
        self.sums = Sums(accelerator, begun.sums)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task("training", completed=begun.step, total=steps)
        if accelerator.is_main_process:
            facts = {**origin(accelerator), "parameters": parameters, "settings": settings}
            write_whole(out / RUN, json.dumps(facts, indent=2) + "\n")
            rewind(out / METRICS, begun.step)
            rewind(out / HELD, begun.step)
            self.say(
                f"{parameters / 1e6:,.2f}M parameters, {steps} steps of "
                f"{amount(settings['train'])}, {facts['device']}; settings in {out / RUN}"
            )
            if begun.step:
                self.say(f"resuming after step {begun.step}")

    def __enter__(self) -> Self:
        if self.accelerator.is_main_process and self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar.live.is_started:
            self.bar.stop()

    def add(self, total: Tensor, mass: Tensor, metrics: Pairs, rows: int, tokens: int) -> None:
        """Add the sums of one step of this process."""
        row_count, token_count = (
            torch.tensor(float(n), device=total.device) for n in (rows, tokens)
        )
        self.sums.add(
            {
                "loss": (total, mass),
                "rows": (row_count, row_count),
                "tokens": (token_count, token_count),
                **metrics,
            }
        )
        self.bar.advance(self.task)

    def write(self, step: int, rate: float) -> None:
        """Reduce the sums, write their means, and reset them."""
        sums = self.sums.reduced()
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        speeds = {f"{name}_per_second": sums.pop(name)[0] / seconds for name in ("rows", "tokens")}
        found = means(sums)
        self.loss, self.sums = found["loss"], Sums(self.accelerator, {})
        left = (self.steps - step) * (now - self.begun) / (step - self.first)
        if not self.accelerator.is_main_process:
            return
        line = {"step": step, **found, "lr": rate, **speeds}
        self.append(METRICS, {**line, "seconds": now - self.begun})
        self.accelerator.log({name: line[name] for name in line if name != "step"}, step=step)
        speed = f"{speeds['tokens_per_second']:,.0f} tokens/s"
        self.bar.update(self.task, description=f"loss {self.loss:.4f}  {speed}")
        self.say(
            f"step {step}/{self.steps}  {listed(found)}  lr {rate:.2e}  {speed}  "
            f"{duration(left)} left"
        )

    def held_out(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the metrics of a validation."""
        if self.accelerator.is_main_process:
            self.append(HELD, {"step": step, **figures})
            named = {f"held_out/{name}": value for name, value in figures.items()}
            self.accelerator.log(named, step=step)
            self.say(f"held out, after step {step}  {listed(figures)}")

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a JSON line to a file of the run."""
        with writing(self.out / name), (self.out / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, soft_wrap=True, markup=False)

    def pending(self) -> dict[str, tuple[float, float]]:
        """Return the sums since the last line, for a run that resumes here."""
        sums = self.sums.reduced()
        means(sums)
        # Rows and tokens only serve the speed, which restarts with the run.
        return {name: pair for name, pair in sums.items() if name not in ("rows", "tokens")}


def amount(train: Mapping[str, Any]) -> str:
    """Describe the batch of a step from the `train` settings."""
    tokens = train["tokens"]
    return f"{train['batch']} examples" if tokens is None else f"{tokens} tokens"


def listed(figures: Mapping[str, float]) -> str:
    """Format figures in one line, sorted by name."""
    return "  ".join(f"{name} {value:.4f}" for name, value in sorted(figures.items()))


def duration(seconds: float) -> str:
    """Format seconds as `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def refuse_other(out: Path, settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` if `out` is not a folder or holds a run with other settings."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out must be a folder, but {out} is a file; give another out")
    if not checkpoints(out / "checkpoints"):
        return
    try:
        before = leaves(json.loads((out / RUN).read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{out / RUN} is missing or damaged, so the run in {out} cannot be identified; "
            "give another out, or delete that run"
        ) from error
    now = leaves(json.loads(json.dumps(settings)))
    changed = [
        f"{key} {before[key]!r} (now {now[key]!r})"
        for key in sorted(before.keys() & now.keys() - FREE)
        if before[key] != now[key] and not key.startswith("held_out.")
    ]
    if changed:
        raise ValueError(
            f"{out} holds a run with {', '.join(changed)}; give another out, or delete that run"
        )


def origin(accelerator: Accelerator) -> dict[str, Any]:
    """Collect the provenance of a run, with its device and number of processes."""
    device = accelerator.device
    return {
        **provenance(),
        "accelerate": accelerate.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": accelerator.num_processes,
    }


def rewind(path: Path, step: int) -> None:
    """Drop lines after a step, and a truncated last line."""
    if path.is_file():
        lines = path.read_text().splitlines()
        write_whole(path, "".join(f"{line}\n" for line in lines if logged(line) <= step))


def logged(line: str) -> float:
    """Return the step of a line of metrics; infinity if the line is truncated."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
