"""Controllers of draft lengths, one per method and models, and stored times of passes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from math import inf
from typing import Any

import torch

from outpace.decoding import Pace
from outpace.engine.job import Job
from outpace.engine.pack import ScheduledForward
from outpace.engine.pairing import Pairing
from outpace.engine.runner import Runner
from outpace.measurements import MeasurementFile
from outpace.methods import Method
from outpace.pacing.controller import PaceController
from outpace.pacing.cost import CostPoints, StoredCosts, step_rows
from outpace.version import __version__

MAX_POWER = 64
"""Highest half power of two of the rows of a pass, and highest power of the running requests."""

MAX_SECONDS = 3600.0
"""Seconds above which a pass is not believed."""

OVERLOAD = 1.25
"""Threads per processor above which times are not kept: they mislead later processes."""


class PassTimes:
    """Times of the passes of each model, by load and rows, read once per model.

    They depend on the machine, the threads, the shape and the formats of a model, its attention
    back end and the versions of the programs, but not on the values of its weights.
    """

    def __init__(self, file: MeasurementFile) -> None:
        self.file = file
        self.entries: dict[str, dict[int, CostPoints]] = {}
        """Points by load for each name of an entry."""

    def read_costs(self, runners: Mapping[str, Runner]) -> StoredCosts:
        """Return the stored costs of models by load and role."""
        costs: dict[int, dict[str, CostPoints]] = {}
        for role, runner in runners.items():
            name = entry_name(runner)
            if name not in self.entries:
                self.entries[name] = read_points(self.file.read_entry(name))
            for load, points in self.entries[name].items():
                costs.setdefault(load, {})[role] = points
        return costs

    def write_costs(self, measured: Iterable[tuple[Mapping[str, Runner], StoredCosts]]) -> None:
        """Write what controllers measured, each with its models, unless the machine was loaded."""
        if is_overloaded():
            return
        changed: dict[str, dict[int, CostPoints]] = {}
        for runners, costs in measured:
            for load, by_role in costs.items():
                for role, points in by_role.items():
                    name = entry_name(runners[role])
                    entry = changed.setdefault(name, dict(self.entries.get(name, {})))
                    entry[load] = {**entry.get(load, {}), **points}
        if changed:
            self.entries |= changed
            self.file.write_entries(changed)


def is_overloaded() -> bool:
    """Return whether more threads ran in the last minute than processors: passes waited."""
    if not hasattr(os, "getloadavg"):
        return False  # Windows does not count them
    return os.getloadavg()[0] > OVERLOAD * (os.cpu_count() or 1)


def entry_name(runner: Runner) -> str:
    """Return the name of a model's entry."""
    # Whatever changes the time of a pass belongs to the name, but not the folder of the model.
    kinds = Counter(type(module).__name__ for module in runner.model.modules())
    tensors = (*runner.model.parameters(), *runner.model.buffers())
    details = (
        repr(runner.config),
        sorted(kinds.items()),
        sorted(Counter(str(tensor.dtype) for tensor in tensors).items()),
        sum(tensor.numel() * tensor.itemsize for tensor in tensors),
        type(runner).__name__,
        type(runner.backend).__name__,
        runner.graphs is not None,
        device_name(runner.device),
        torch.get_num_threads(),
    )
    digest = sha256(repr(details).encode()).hexdigest()[:32]
    return f"pass times {digest}, PyTorch {torch.__version__}, outpace {__version__}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def read_points(entry: Any) -> dict[int, CostPoints]:
    """Return the points of an entry by load; what is not valid is left out."""
    found: dict[int, CostPoints] = {}
    for load, points in entry.items() if isinstance(entry, dict) else ():
        if is_power(load) and isinstance(points, dict):
            valid = {int(key): (p[0], p[1]) for key, p in points.items() if is_point(key, p)}
            if valid:
                found[int(load)] = valid
    return found


def is_power(key: str) -> bool:
    """Return whether a key is a small number in decimal digits."""
    return key.isascii() and key.isdigit() and len(key) <= 2 and int(key) <= MAX_POWER


def is_point(key: str, point: Any) -> bool:
    """Return whether a point is a number of rows that fits its key, with plausible seconds."""
    match point:
        case [int() | float() as rows, int() | float() as seconds]:
            limit = step_rows(int(key)) if is_power(key) else -inf
            return limit / 2 < rows < 2 * limit and 0 < seconds < MAX_SECONDS
    return False


MAX_CONTROLLERS = 256
"""Most combinations of method, options and models whose measurements are kept."""


class ControllerTable(dict[tuple[Method | str | None, ...], PaceController]):
    """A controller for each method, adapter and models; the oldest ones are dropped.

    With `pass_times` they start from times that earlier processes stored.
    """

    def __init__(self, pass_times: PassTimes | None = None) -> None:
        super().__init__()
        self.pass_times = pass_times
        self.runners: dict[PaceController, Mapping[str, Runner]] = {}
        """Models by role."""

    def controller_for(self, method: Method, pairing: Pairing, *, auto: bool) -> Pace | None:
        """Return the controller that requests of a method share; None where its length is fixed."""
        lengths = method.length_range(pairing.target, auto=auto)
        if lengths is None:
            return None
        key: tuple[Method | str | None, ...] = (
            method,
            pairing.adapter,
            *(runner.name for runner in pairing.runners.values()),
        )
        if (controller := self.get(key)) is None:
            times = self.pass_times
            stored = None if times is None else times.read_costs(pairing.runners)
            controller = self.setdefault(key, PaceController(lengths, stored))
            self.runners[controller] = pairing.runners
        while len(self) > MAX_CONTROLLERS:
            if (oldest := self.pop(list(self)[0], None)) is not None:
                del self.runners[oldest]
        return controller

    def store_times(self) -> None:
        """Store the times that all controllers measured, for later processes."""
        if self.pass_times is not None:
            self.pass_times.write_costs(
                (self.runners[each], each.measured_costs) for each in self.values()
            )

    def pass_controllers(
        self, work: Sequence[tuple[Job, ScheduledForward, ScheduledForward | None]], requests: int
    ) -> set[tuple[Pace, str]]:
        """Return the controllers that measure a pass with their roles, and set their load."""
        used = ((job.pace, forward.model) for job, forward, _ in work)
        controllers = {(pace, role) for pace, role in used if pace is not None}
        for pace, _ in controllers:
            pace.set_requests(requests)
        return controllers
