"""Models with random weights: shapes by name, and checkpoints written on demand."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outpace.benchmark.entry import RANDOM_PREFIX
from outpace.checkpoints.fields import read_json_object
from outpace.checkpoints.load import save_model, translate_config
from outpace.decoding import DRAFT_KINDS
from outpace.methods import Method
from outpace.models.transformer import Transformer

SHAPES = Path(__file__).parent / "shapes.toml"
WEIGHT_STD = 0.02
"""Standard deviation of the weights, the usual initialization."""


def shape_of(name: str) -> dict[str, Any]:
    """Return the `config.json` of a shape's name or of a file; `ValueError` if unknown."""
    known: dict[str, dict[str, Any]] = tomllib.loads(SHAPES.read_text("utf-8"))
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise ValueError(
            f"unknown shape {name!r}; choose one of {', '.join(known)}, or give a config.json"
        )
    return read_json_object(Path(name))


@dataclass(slots=True, kw_only=True)
class RandomCheckpoints:
    """Checkpoints with random weights in a folder, each written when first requested.

    Attributes:
        paths: folders by model name, including names set by callers.
    """

    folder: Path
    dtype: torch.dtype
    device: torch.device
    paths: dict[str, str] = field(default_factory=dict)

    def model_path(self, name: str) -> str:
        """Return the folder or name to load for a model; `ValueError` for an unknown shape."""
        if name.startswith(RANDOM_PREFIX) and name not in self.paths:
            folder = self.folder / str(len(self.paths))
            self.write_checkpoint(shape_of(name.removeprefix(RANDOM_PREFIX)), folder)
            self.paths[name] = str(folder)
        return self.paths.get(name, name)

    def resolve_method(self, method: Method) -> Method:
        """Return the method with its other models replaced by loadable paths."""
        roles = {role: self.model_path(str(name)) for role, name in method.model_names().items()}
        return replace(method, **roles) if roles else method

    def write_checkpoint(self, published: dict[str, Any], folder: Path) -> None:
        """Write a reproducible checkpoint; `ValueError` for a draft that needs a target."""
        config = translate_config(published)
        if config.kind in DRAFT_KINDS:
            raise ValueError(
                f"{config.architecture} is a draft that reads features, which cannot be measured "
                "with random weights"
            )
        with torch.device("meta"):
            model = Transformer(config).requires_grad_(False)
        model.to(self.dtype).to_empty(device=self.device)
        noise = torch.Generator(self.device).manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, WEIGHT_STD, generator=noise)
        save_model(model, folder, dtype=self.dtype)
