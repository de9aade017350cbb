"""Adapters of a model in the engine, and the rows of a pass that they apply to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from outpace.engine.cpu import MLP_CHUNK_ROWS, DirectMLP
from outpace.engine.pack import PackedPass, ScheduledForward
from outpace.errors import OptionError
from outpace.models.adapted import AdaptedLinear, AdapterRows, ModelUpdates
from outpace.models.replacement import Replacement
from outpace.models.transformer import MLP, Stack


class AdaptedMLP(Replacement, MLP):
    """A direct MLP with adapted layers, which receive the same chunks of its rows."""

    def __init__(self, mlp: DirectMLP, rows: AdapterRows) -> None:
        super().__init__(mlp)
        self.rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= MLP_CHUNK_ROWS:
            mapped: Tensor = self.original[0](x)
            return mapped
        return torch.cat([self.original[0](c) for c in self.rows.split_rows(x, MLP_CHUNK_ROWS)])


class PassAdapters:
    """The adapters of one model, applied to the rows of the sequences that use them.

    Args:
        model: the model, packed for its device.
        adapters: updates of each adapter, by its name.
    """

    def __init__(self, model: Stack, adapters: Mapping[str, ModelUpdates]) -> None:
        self.rows = AdapterRows(model.norm.weight.device)
        for name, updates in adapters.items():
            for path, parts in updates.items():
                adapt_layer(model, path, self.rows).add_adapter(name, parts)
        for path, module in list(model.named_modules()):
            adapted = any(isinstance(part, AdaptedLinear) for part in module.children())
            if adapted and isinstance(module, DirectMLP):
                model.set_submodule(path, AdaptedMLP(module, self.rows))

    @property
    def is_active(self) -> bool:
        """Whether a row of the current pass has an adapter."""
        return bool(self.rows.runs)

    @contextmanager
    def apply_to(self, forwards: Sequence[ScheduledForward]) -> Iterator[None]:
        """Apply the adapters to the rows of a pass, until its logits are read."""
        self.rows.assign_runs((each.table.adapter, len(each.ids)) for each in forwards)
        try:
            yield
        finally:
            self.rows.assign_runs(())  # a draft may borrow the head

    def select_wanted(self, forwards: Sequence[ScheduledForward], packed: PackedPass) -> None:
        """Apply the adapters to the rows whose logits are wanted, in the order of the reads."""
        wanted = (forwards[index] for group in packed.groups for index in group.members)
        self.rows.assign_runs((each.table.adapter, len(each.slots)) for each in wanted)


def adapt_layer(model: Stack, path: str, rows: AdapterRows) -> AdaptedLinear:
    """Return an adapted layer of a model, which replaces the linear layer there."""
    module = model.get_submodule(path)
    if isinstance(module, AdaptedLinear):
        return module
    assert isinstance(module, nn.Linear)
    adapted = AdaptedLinear(module, rows)
    model.set_submodule(path, adapted)
    return adapted


def check_adapters(adapters: object, **unsupported: bool) -> None:
    """Raise `OptionError` for invalid adapters, or an option that cannot be combined with them."""
    if adapters is None:
        return
    if not isinstance(adapters, Mapping):
        raise OptionError("adapters", adapters, "must map names to folders")
    for name in adapters:
        if not (isinstance(name, str) and name and name.isprintable()):
            raise OptionError("adapters", name, f"a name must be printable text, got {name!r}")
    for option, is_set in unsupported.items():
        if adapters and is_set:
            raise OptionError(
                "adapters", adapters, f"cannot be combined with {option}: omit one of the two"
            )


def check_adapter_name(name: str | None, known: Sequence[str], model: str) -> None:
    """Raise `OptionError` for an adapter that a model does not have."""
    if name is not None and name not in known:
        raise OptionError(
            "adapter", name, f"must be one of {', '.join(known) or 'none'} for {model}"
        )
