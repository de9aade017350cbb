"""What a run writes about itself: where it came from, and a line of metrics now and then."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from outpace.provenance import provenance
from outpace.training.checkpoint import Progress, checkpoints
from outpace.training.folder import write_whole, writing

RUN = "run.json"
FREE = {"out", "train.steps", "train.log_every", "train.save_every", "train.accumulation"}


class Report:
    """Sums over steps and processes, written as log lines and `metrics.jsonl`."""

    def __init__(
        self,
        out: Path,
        accelerator: Accelerator,
        begun: Progress,
        steps: int,
        settings: Mapping[str, Any],
        parameters: int,
    ) -> None:
        """Write `run.json` and drop metrics of steps that are done again."""
        self.accelerator, self.first, self.steps = accelerator, begun.step, steps
        self.metrics, self.console = out / "metrics.jsonl", Console(highlight=False)
        self.loss = float("nan")
        self.begun = self.since = time.perf_counter()
        # One process goes on with what all had counted; those of the others are zeros.
        mine = torch.tensor(float(accelerator.is_main_process), device=accelerator.device)
        self.sums = {name: [mine * part for part in pair] for name, pair in begun.sums.items()}
        if accelerator.is_main_process:
            facts = {**origin(accelerator), "parameters": parameters, "settings": settings}
            write_whole(out / RUN, json.dumps(facts, indent=2) + "\n")
            rewind(self.metrics, begun.step)
            self.console.print(json.dumps(settings), soft_wrap=True)
            if begun.step:
                self.console.print(f"goes on after step {begun.step}")

    def add(
        self, total: Tensor, mass: Tensor, metrics: Mapping[str, tuple[Tensor, Tensor]], rows: int
    ) -> None:
        """Count one step of this process."""
        count = torch.tensor(float(rows), device=total.device)
        for name, pair in {"loss": (total, mass), "rows": (count, count), **metrics}.items():
            old = self.sums.get(name, [torch.zeros_like(total), torch.zeros_like(total)])
            self.sums[name] = [old[0] + pair[0], old[1] + pair[1]]

    def write(self, step: int, rate: float) -> None:
        """Reduce what was counted, write it, and begin anew."""
        sums = self.reduced()
        now = time.perf_counter()
        rows, seconds, self.since = sums.pop("rows")[0], now - self.since, now
        means = {name: value / max(over, 1e-9) for name, (value, over) in sums.items()}
        self.loss, self.sums = means["loss"], {}
        left = (self.steps - step) * (now - self.begun) / (step - self.first)
        if not self.accelerator.is_main_process:
            return
        line = {"step": step, **means, "lr": rate, "rows_per_second": rows / seconds}
        with writing(self.metrics), self.metrics.open("a") as file:
            file.write(json.dumps({**line, "seconds": now - self.begun}) + "\n")
        text = "  ".join(f"{name} {value:.4f}" for name, value in sorted(means.items()))
        self.console.print(
            f"step {step}/{self.steps}  {text}  lr {rate:.2e}  {rows / seconds:,.0f} rows/s  "
            f"{left / 60:.1f} min left",
            soft_wrap=True,
        )

    def pending(self) -> dict[str, tuple[float, float]]:
        """What was counted since the last line, for a run that goes on from here."""
        # Rows are left out: they are there for the speed, which begins anew.
        return {name: pair for name, pair in self.reduced().items() if name != "rows"}

    def reduced(self) -> dict[str, tuple[float, float]]:
        """The sums over all processes."""
        if not self.sums:
            return {}
        names = sorted(self.sums)
        flat = torch.stack([part for name in names for part in self.sums[name]])
        values = self.accelerator.reduce(flat, reduction="sum").view(-1, 2).tolist()
        return {name: (total, over) for name, (total, over) in zip(names, values, strict=True)}


def refuse_other(out: Path, settings: Mapping[str, Any]) -> None:
    """Refuse what is no folder, and to go on with a run whose settings decided other numbers."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is no folder; give another out")
    if not checkpoints(out / "checkpoints"):
        return
    try:
        before = leaves(json.loads((out / RUN).read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{out / RUN} is missing or damaged, so there is no telling which run {out} holds; "
            "give another out, or delete that run"
        ) from error
    now = leaves(json.loads(json.dumps(settings)))
    changed = [
        f"{key} {before[key]!r} (now {now[key]!r})"
        for key in sorted(before.keys() & now.keys() - FREE)
        if before[key] != now[key]
    ]
    if changed:
        raise ValueError(
            f"{out} holds a run with {', '.join(changed)}; give another out, or delete that run"
        )


def origin(accelerator: Accelerator) -> dict[str, Any]:
    """Provenance of a run, with the device and the number of processes."""
    device = accelerator.device
    return {
        **provenance(),
        "accelerate": accelerate.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": accelerator.num_processes,
    }


def rewind(path: Path, step: int) -> None:
    """Drop the lines of later steps, and one that was cut off."""
    if path.is_file():
        lines = path.read_text().splitlines()
        write_whole(path, "".join(f"{line}\n" for line in lines if logged(line) <= step))


def logged(line: str) -> float:
    """The step of a line of metrics; beyond all where it was cut off."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What stands in nested tables, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        found |= leaves(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found
