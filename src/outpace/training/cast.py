"""The models of a recipe as its configurations name them, for tensors without memory."""

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
"""Files of a hub repository without its weights."""


def modelled(
    recipe: Recipe, *, attached: bool = True
) -> tuple[Transformer | Draft, dict[str, Transformer]]:
    """The model of a recipe, with its adapter where that is `attached`, and those that look on.

    Weights are random, so they are made where tensors have no memory.
    """
    given = recipe.model
    others: dict[str, Transformer] = {}
    if given.target is not None:
        others["target"] = target = Transformer(load_config(light(given.target)))
        named = given.init and load_config(light(given.init))
        config = weights.drafting(named or translate(given.config))
        made: Transformer | Draft = draft_of(config, target)
    elif given.init is None:
        made = Transformer(translate(given.config))
    else:
        folder = light(given.init)
        config = weights.changed(load_config(folder), given.config, folder / CONFIG)
        made = Transformer(config)
    if recipe.adapter is not None and attached:
        lora.attach(made, recipe.adapter, recipe.train.seed)
    return made, others


def in_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Put weights in a dtype; `Module.to` cannot where they are fake tensors."""
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))


def light(name: str) -> Path:
    """Folder of a checkpoint, whose weights are not downloaded for this."""
    return resolve(name, LIGHT)
