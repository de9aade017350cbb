"""Controllers of draft lengths, one per method and models, and stored costs of passes."""

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
from outpace.pacing.cost import CostPoints, LoadKey, StoredCosts, step_rows
from outpace.version import __version__

MAX_POWER = 64
"""Highest half power of two of the rows of a pass, and highest power of the running requests."""

MAX_RATIO = 1e6
"""Ratio above which a cost is not believed."""

OVERLOAD = 1.25
"""Threads per processor above which costs are not stored: they mislead later processes."""


class StoredPassCosts:
    """Costs of the passes of models that run together, by load and role.

    They depend on the machine, the threads, the shapes and the formats of the models, their
    attention back ends and the versions of the programs, but not on the values of the weights.
    """

    def __init__(self, file: MeasurementFile) -> None:
        self.file = file
        self.entries: dict[str, StoredCosts] = {}
        """Costs for each name of an entry, read once."""

    def read_costs(self, runners: Mapping[str, Runner]) -> StoredCosts:
        """Return the stored costs of models that run together."""
        if (name := entry_name(runners)) not in self.entries:
            self.entries[name] = read_entry(self.file.read_entry(name))
        return self.entries[name]

    def write_costs(self, measured: Iterable[tuple[Mapping[str, Runner], StoredCosts]]) -> None:
        """Write what controllers measured, each with its models, unless the machine was loaded."""
        if is_overloaded():
            return
        changed: dict[str, StoredCosts] = {}
        for runners, costs in measured:
            if costs:
                name = entry_name(runners)
                changed[name] = {**changed.get(name, self.read_costs(runners)), **costs}
        if changed:
            self.entries |= changed
            self.file.write_entries({name: write_entry(costs) for name, costs in changed.items()})


def is_overloaded() -> bool:
    """Return whether more threads ran in the last minute than processors: passes waited."""
    if not hasattr(os, "getloadavg"):
        return False  # Windows does not count them
    return os.getloadavg()[0] > OVERLOAD * (os.cpu_count() or 1)


def entry_name(runners: Mapping[str, Runner]) -> str:
    """Return the name of the entry of models that run together."""
    details = sorted((role, runner_details(runner)) for role, runner in runners.items())
    digest = sha256(repr(details).encode()).hexdigest()[:32]
    return f"pass costs {digest}, PyTorch {torch.__version__}, outpace {__version__}"


def runner_details(runner: Runner) -> tuple[object, ...]:
    """Return what the time of a pass depends on, without the folder of the model."""
    kinds = Counter(type(module).__name__ for module in runner.model.modules())
    tensors = (*runner.model.parameters(), *runner.model.buffers())
    return (
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


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def read_entry(entry: Any) -> dict[LoadKey, dict[str, CostPoints]]:
    """Return the costs of an entry by load and role; what is not valid is left out."""
    found: dict[LoadKey, dict[str, CostPoints]] = {}
    for load, by_role in entry.items() if isinstance(entry, dict) else ():
        requests, _, context = load.partition("/")
        if is_power(requests) and is_power(context) and isinstance(by_role, dict):
            valid = {role: read_points(points) for role, points in by_role.items()}
            if all(valid.values()) and "target" in valid:
                found[int(requests), int(context)] = valid
    return found


def write_entry(costs: StoredCosts) -> dict[str, Mapping[str, CostPoints]]:
    """Return costs as `read_entry` reads them."""
    return {f"{requests}/{context}": costs[requests, context] for requests, context in costs}


def read_points(points: Any) -> CostPoints:
    """Return the valid points of a role."""
    if not isinstance(points, dict):
        return {}
    return {int(key): (p[0], p[1]) for key, p in points.items() if is_point(key, p)}


def is_power(key: str) -> bool:
    """Return whether a key is a small number in decimal digits."""
    return key.isascii() and key.isdigit() and len(key) <= 2 and int(key) <= MAX_POWER


def is_point(key: str, point: Any) -> bool:
    """Return whether a point is a number of rows that fits its key, with a plausible ratio."""
    match point:
        case [int() | float() as rows, int() | float() as ratio]:
            limit = step_rows(int(key)) if is_power(key) else -inf
            return limit / 2 < rows < 2 * limit and 0 < ratio < MAX_RATIO
    return False


MAX_CONTROLLERS = 256
"""Most combinations of method, options and models whose measurements are kept."""


class ControllerTable(dict[tuple[Method | str | None, ...], PaceController]):
    """A controller for each method, adapter and models; the oldest ones are dropped.

    With `pass_costs` they start from costs that earlier processes stored.
    """

    def __init__(self, pass_costs: StoredPassCosts | None = None) -> None:
        super().__init__()
        self.pass_costs = pass_costs
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
            costs = self.pass_costs
            stored = None if costs is None else costs.read_costs(pairing.runners)
            controller = self.setdefault(key, PaceController(lengths, stored))
            self.runners[controller] = pairing.runners
        while len(self) > MAX_CONTROLLERS:
            if (oldest := self.pop(list(self)[0], None)) is not None:
                del self.runners[oldest]
        return controller

    def store_costs(self) -> None:
        """Store the costs that all controllers measured, for later processes."""
        if self.pass_costs is not None:
            self.pass_costs.write_costs(
                (self.runners[each], each.measured_ratios) for each in self.values()
            )

    def pass_controllers(
        self,
        work: Sequence[tuple[Job, ScheduledForward, ScheduledForward | None]],
        load: tuple[int, int],
    ) -> set[tuple[Pace, str]]:
        """Return the controllers that measure a pass with their roles, and set their load."""
        used = ((job.pace, forward.model) for job, forward, _ in work)
        controllers = {(pace, role) for pace, role in used if pace is not None}
        for pace, _ in controllers:
            pace.set_load(*load)
        return controllers
