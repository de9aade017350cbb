"""Where the weights of a run begin: at random, or at a checkpoint, as it is or adapted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outpace.checkpoints.families import FAMILIES
from outpace.checkpoints.load import (
    family_of,
    load_config,
    load_draft,
    load_model,
    resolve,
    translate,
)
from outpace.decoding.target import DRAFT_KINDS, Kind
from outpace.models.config import ModelConfig
from outpace.models.draft import Draft
from outpace.models.extending import draft_of
from outpace.models.rope import rotate
from outpace.models.transformer import Attention, Transformer


def fresh(config: Mapping[str, Any], seed: int) -> Transformer:
    """A model with random weights from the content of a `config.json`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(translate(config))


def changed(source: ModelConfig, changes: Mapping[str, Any], path: Path) -> ModelConfig:
    """A configuration with some published fields changed.

    For a family that spells its configuration otherwise, the changes are a whole `config.json`.
    """
    if not changes:
        return source
    published = {**source.source, **changes}
    if family_of(published, path).names is not FAMILIES[source.family].names:
        published = dict(changes)
    return translate(published, path)


def adapted(
    init: str, changes: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> Transformer:
    """The weights of a checkpoint under its `config.json` with some fields changed.

    Where the shift goes, queries are turned to look from the slot before their own.
    """
    source = load_model(init, dtype=dtype, plain=True)
    if not changes:
        return source
    model = Transformer(changed(source.config, changes, resolve(init) / "config.json")).to(dtype)
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weights = dict(source.named_parameters())
    if sizes != {name: parameter.shape for name, parameter in weights.items()}:
        raise ValueError(
            f"the changes {dict(changes)} give {init!r} other tensors than it has weights for; "
            "change only fields that keep their shapes"
        )
    model.load_state_dict(weights)
    if model.config.shift < source.config.shift:
        look_left(model)
    return model


@torch.no_grad()
def look_left(model: Transformer) -> None:
    """Turn the queries of all layers back by one position.

    Under a shift the row before a slot predicts it, and has learnt at what distance to look. The
    slot's own row, which predicts it without a shift, now looks at the same slots.
    """
    config = model.config
    for attention in model.modules():
        if not (isinstance(attention, Attention) and attention.rotates):
            continue
        own = attention.own_angles or slice(None)
        cos, sin = model.cos[1, own], -model.sin[1, own]
        for parameter in attention.qkv.parameters():
            heads = parameter[: config.heads * config.head_dim].unflatten(0, (config.heads, -1))
            heads.copy_(rotate(heads.movedim(1, -1), cos, sin).movedim(-1, 1))


def draft(init: str | None, config: Mapping[str, Any], target: Transformer, seed: int) -> Draft:
    """A draft for a target: that of a checkpoint, or one with random weights."""
    if init is not None:
        if config:
            raise ValueError("a draft is trained on as it is; give [model] init or config")
        drafting(load_config(init))
        made = load_draft(init, target, plain=True).float()
        made.cos, made.sin = made.rotary()
        return made
    published = drafting(translate(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return draft_of(published, target)


def drafting(config: ModelConfig) -> ModelConfig:
    """The configuration of a draft; `ValueError` for that of another model.

    So is one whose block may say part of the vocabulary: a loss would count what it cannot say.
    """
    if config.kind is Kind.DRAFT and 0 < config.draft_vocab < config.vocab:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab}, but a draft of blocks is trained over all "
            f"{config.vocab} tokens"
        )
    if config.kind not in DRAFT_KINDS:
        raise ValueError(
            f"[model] has a target, but {config.architecture} is no draft that reads features"
        )
    return config
