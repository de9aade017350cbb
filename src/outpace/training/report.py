"""What a run writes about itself: where it came from, and a line of metrics now and then."""

import json
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

RUN = "run.json"
FREE = {"out", "train.steps", "train.log_every", "train.save_every", "train.accumulation"}


class Report:
    """Sums over steps and processes, written as log lines and `metrics.jsonl`."""

    def __init__(
        self,
        out: Path,
        accelerator: Accelerator,
        first: int,
        steps: int,
        settings: Mapping[str, Any],
        parameters: int,
    ) -> None:
        """Write `run.json` and drop metrics of steps that are done again."""
        self.accelerator, self.first, self.steps = accelerator, first, steps
        self.metrics, self.console = out / "metrics.jsonl", Console(highlight=False)
        self.loss = float("nan")
        self.begun = self.since = time.perf_counter()
        self.sums: dict[str, list[Tensor]] = {}
        if accelerator.is_main_process:
            out.mkdir(parents=True, exist_ok=True)
            facts = {**origin(accelerator), "parameters": parameters, "settings": settings}
            (out / RUN).write_text(json.dumps(facts, indent=2) + "\n")
            _rewind(self.metrics, first)
            self.console.print(json.dumps(settings), soft_wrap=True)
            if first:
                self.console.print(f"goes on after step {first}")

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
        names = sorted(self.sums)
        flat = torch.stack([part for name in names for part in self.sums[name]])
        values = self.accelerator.reduce(flat, reduction="sum").view(-1, 2).tolist()
        sums = dict(zip(names, values, strict=True))
        now = time.perf_counter()
        rows, seconds, self.since = sums.pop("rows")[0], now - self.since, now
        means = {name: value / max(over, 1e-9) for name, (value, over) in sums.items()}
        self.loss, self.sums = means["loss"], {}
        left = (self.steps - step) * (now - self.begun) / (step - self.first)
        if not self.accelerator.is_main_process:
            return
        line = {"step": step, **means, "lr": rate, "rows_per_second": rows / seconds}
        with self.metrics.open("a") as file:
            file.write(json.dumps({**line, "seconds": now - self.begun}) + "\n")
        text = "  ".join(f"{name} {value:.4f}" for name, value in sorted(means.items()))
        self.console.print(
            f"step {step}/{self.steps}  {text}  lr {rate:.2e}  {rows / seconds:,.0f} rows/s  "
            f"{left / 60:.1f} min left",
            soft_wrap=True,
        )


def refuse_other(out: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a run whose settings decided other numbers."""
    if not (out / RUN).is_file() or not any(out.glob("checkpoints/step-*")):
        return
    before = _leaves(json.loads((out / RUN).read_text())["settings"])
    now = _leaves(json.loads(json.dumps(settings)))
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


def _rewind(path: Path, step: int) -> None:
    if path.is_file():
        lines = path.read_text().splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        path.write_text("".join(f"{line}\n" for line in kept))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        leaves |= _leaves(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return leaves
