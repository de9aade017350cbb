"""DFlash drafts: Qwen3's layers between a target's embedding and head (Chen et al., 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outpace.models.config import DraftConfig, Rope, Sight
from outpace.models.families.family import HUGGING_FACE_NAMES as NAMES
from outpace.models.families.family import Family, hugging_face_fields, without_prefix

KNOWN = ("block_size", "causal", "mask_token_id", "target_layer_ids")
BLOCK = 16


def translate(config: Mapping[str, Any]) -> DraftConfig:
    """A draft's `config.json`, in any of the published spellings, as ours."""
    own = config.get("dflash_config") or {}
    refuse_others(config, own)
    fields = {**config, **own}
    bias = config.get("attention_bias", False)
    shared = dict(hugging_face_fields(config)) | {
        "head_dim": config.get("head_dim", 128),
        "mask_id": fields["mask_token_id"],
        "tied": False,
        "eos": (),
    }
    return DraftConfig(
        family="dflash",
        **shared,
        rope=Rope.of(config),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        shift=0,
        bidirectional=True,
        feature_layers=feature_layers(fields),
        target_layers=config.get("num_target_layers"),
        block=fields.get("block_size", BLOCK),
        sights=Sight.of(config, own.get("causal", config.get("is_causal"))),
    )


def feature_layers(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of the target, counted from 0; spread evenly where a checkpoint lists none."""
    if (ids := fields.get("target_layer_ids")) is not None:
        return tuple(ids)
    if (ids := fields.get("eagle_aux_hidden_state_layer_ids")) is not None:
        return tuple(layer - 1 for layer in ids)  # these count the embedding as layer 0
    depth, count = fields["num_target_layers"], fields["num_hidden_layers"]
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + index * (depth - 4) / (count - 1)) for index in range(count))


def refuse_others(config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming a field that makes it another kind of draft than this."""
    usual = {"draft_vocab_size": config["vocab_size"], "target_hidden_size": config["hidden_size"]}
    usual |= {"is_neox_style": True, "sample_from_anchor": False, "output_multiplier": 1.0}
    given = {name: config.get(name) for name in usual}
    given |= {name: value for name, value in own.items() if name not in KNOWN}
    for name, value in given.items():
        if value is not None and value != usual.get(name, False):
            raise ValueError(
                f"{name} is {value!r} in the config.json of a draft: drafts of that kind are not "
                "supported; choose one without it"
            )


DFLASH = Family(
    name="dflash",
    about="DFlash: a draft that reads the hidden states of its target",
    architectures=("DFlashDraftModel",),
    config=translate,
    names={
        **without_prefix(NAMES, "model."),
        "fusion.weight": "fc.weight",
        "fusion_norm.weight": "hidden_norm.weight",
    },
)
