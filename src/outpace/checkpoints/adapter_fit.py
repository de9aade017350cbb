"""Adapters kept apart from the base weights, checked against its linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from outpace.checkpoints.adapter import Adapter, LowRank
from outpace.checkpoints.weights import parameter_parts
from outpace.errors import OptionError
from outpace.models.adapted import ModelUpdates, OutputUpdate
from outpace.models.config import ModelConfig
from outpace.models.experts import Experts
from outpace.models.transformer import Transformer


def load_adapters(
    adapters: Mapping[str, str | Path], config: ModelConfig, dtype: torch.dtype
) -> dict[str, ModelUpdates]:
    """Load adapters of a model by name; no weights of the model are read."""
    found: dict[str, ModelUpdates] = {}
    for name, folder in adapters.items():
        try:
            adapter = Adapter(folder)
            if adapter.changes:
                fields = ", ".join(adapter.changes)
                raise ValueError(f"it changes {fields} of the model: load it as adapter instead")
            found[name] = fit_adapter(adapter, config, dtype)
        except ValueError as error:
            message = str(error).removeprefix("adapter: ")
            raise OptionError("adapters", folder, f"{name}: {message}") from error
    return found


def fit_adapter(adapter: Adapter, config: ModelConfig, dtype: torch.dtype) -> ModelUpdates:
    """Return the updates of an adapter by linear layer of a model, in the dtype of its rows."""
    with torch.device("meta"):
        model = Transformer(config)
    parts_by_name = parameter_parts(model, adapter.updates)
    adapter.check_names({part.source for parts in parts_by_name.values() for part in parts})
    updates: dict[str, list[OutputUpdate]] = {}
    for name, parts in parts_by_name.items():
        begin = 0
        for part in parts:
            outputs = slice(begin, begin + part.shape[0])
            begin = outputs.stop
            if part.source in adapter.updates:
                adapter.check_shape(part.source, part.shape)
                path = name.removesuffix(".weight")
                check_layer(model, path, f"{adapter.folder}: {part.source!r}")
                update = convert_update(adapter.updates[part.source], outputs, dtype)
                if not all(each.isfinite().all() for each in (update.down, update.up)):
                    what = f"the update of {part.source!r} exceeds the range of {dtype}"
                    raise ValueError(f"{adapter.folder}: {what}; choose a wider dtype")
                updates.setdefault(path, []).append(update)
    return updates


def check_layer(model: Transformer, path: str, title: str) -> None:
    """Raise `ValueError` for a module whose updates cannot be applied per row."""
    names = path.split(".")
    parents = (model.get_submodule(".".join(names[:end])) for end in range(1, len(names)))
    if any(isinstance(parent, Experts) for parent in parents):
        kind = "belongs to a mixture of experts"
    elif not isinstance(model.get_submodule(path), nn.Linear):
        kind = "is not the matrix of a linear layer"
    else:
        return
    raise ValueError(f"{title} {kind}, so its update can only be merged: set adapter instead")


def convert_update(update: LowRank, outputs: slice, dtype: torch.dtype) -> OutputUpdate:
    """Return an update with its scale in the second matrix."""
    up = (update.scale * update.up.float()).to(dtype)
    return OutputUpdate(outputs, update.down.to(dtype), up)
