"""Models of a recipe, built from configurations alone, for fake tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from outpace.checkpoints.load import CONFIG_FILE, load_config, resolve_checkpoint, translate_config
from outpace.models.draft import Draft
from outpace.models.extending import build_draft_model
from outpace.models.transformer import Transformer
from outpace.training import lora, weights
from outpace.training.recipe import Recipe

METADATA_PATTERNS = ("*.json", "*.txt", "*.jinja")
"""Patterns of the files of a hub repository other than weights."""


def build_models(
    recipe: Recipe, *, with_adapter: bool = True
) -> tuple[Transformer | Draft, dict[str, Transformer]]:
    """Build a recipe's trained model and its reference models, by role.

    Weights are random; call it on the meta device or under a fake-tensor mode. The adapter is
    attached only if `with_adapter`.
    """
    given = recipe.model
    others: dict[str, Transformer] = {}
    if given.target is not None:
        others["target"] = target = Transformer(load_config(resolve_metadata(given.target)))
        published = given.init and load_config(resolve_metadata(given.init))
        config = weights.check_draft_config(published or translate_config(given.config))
        model: Transformer | Draft = build_draft_model(config, target)
    elif given.init is None:
        model = Transformer(translate_config(given.config))
    else:
        folder = resolve_metadata(given.init)
        config = weights.change_config(load_config(folder), given.config, folder / CONFIG_FILE)
        model = Transformer(config)
    weights.check_trainable(model.config)
    weights.mark_trainable(model)
    if recipe.adapter is not None and with_adapter:
        lora.attach_adapter(model, recipe.adapter, recipe.train.seed)
    return model, others


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place; `Module.to` fails on fake tensors."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))


def resolve_metadata(name: str) -> Path:
    """Return the folder of a checkpoint without downloading its weights."""
    return resolve_checkpoint(name, METADATA_PATTERNS)
