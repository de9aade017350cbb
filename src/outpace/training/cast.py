"""Models of a recipe, built from configurations alone, for fake tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from outpace.checkpoints.load import CONFIG, load_config, resolve, translate
from outpace.models.draft import Draft
from outpace.models.extending import draft_of
from outpace.models.transformer import Transformer
from outpace.training import lora, weights
from outpace.training.recipe import Recipe

LIGHT = ("*.json", "*.txt", "*.jinja")
"""Patterns of the files of a hub repository other than weights."""


def modelled(
    recipe: Recipe, *, attached: bool = True
) -> tuple[Transformer | Draft, dict[str, Transformer]]:
    """Build a recipe's trained model and its reference models, by role.

    Weights are random; call it on the meta device or under a fake-tensor mode. The adapter is
    attached only if `with_adapter`.
    """
    given = recipe.model
    others: dict[str, Transformer] = {}
    if given.target is not None:
        others["target"] = target = Transformer(load_config(light(given.target)))
        published = given.init and load_config(light(given.init))
        config = weights.drafting(published or translate(given.config))
        model: Transformer | Draft = draft_of(config, target)
    elif given.init is None:
        model = Transformer(translate(given.config))
    else:
        folder = light(given.init)
        config = weights.changed(load_config(folder), given.config, folder / CONFIG)
        model = Transformer(config)
    if recipe.adapter is not None and attached:
        lora.attach(model, recipe.adapter, recipe.train.seed)
    return model, others


def in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters in place; `Module.to` fails on fake tensors."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))


def light(name: str) -> Path:
    """Return the folder of a checkpoint without downloading its weights."""
    return resolve(name, LIGHT)
