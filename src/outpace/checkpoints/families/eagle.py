"""EAGLE-3 drafts: one Llama layer on a target's features (Li et al., 2025)."""

from __future__ import annotations

from operator import itemgetter

from outpace.checkpoints.families.family import (
    DECODER,
    FIXED_FIELDS,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    Family,
    replace_prefix,
)
from outpace.checkpoints.families.gguf_format import EAGLE_GGUF
from outpace.checkpoints.fields import Field, Fields, count, either, field, flag, indices, inner
from outpace.decoding.target import Kind

EAGLE_KEY, EAGLE_LAYER_IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
NESTED_LAYERS = field(f"{EAGLE_KEY}.{EAGLE_LAYER_IDS}", indices, ())
TOP_LAYERS = field(EAGLE_LAYER_IDS, indices, ())


def flatten_eagle(published: Fields) -> Fields:
    nested = {f"{EAGLE_KEY}.{name}": value for name, value in inner(published, EAGLE_KEY).items()}
    return {name: value for name, value in published.items() if name != EAGLE_KEY} | nested


def eagle_feature_layers(published: Fields, ours: Fields) -> tuple[int, ...]:
    """Return the target layers whose outputs are read, from 0; the top level lists their inputs."""
    counted = tuple(layer - 1 for layer in TOP_LAYERS.read(published, ours))
    listed = either(
        NESTED_LAYERS.read(published, ours), counted, (*NESTED_LAYERS.names, *TOP_LAYERS.names)
    )
    if len(set(listed)) != len(listed) or len(listed) == 1:
        raise ValueError(f"{EAGLE_LAYER_IDS} must list several distinct layers, got {[*listed]}")
    return listed


EAGLE = Family(
    name="eagle",
    about="EAGLE-3: a draft of one layer that extends the hidden states of its target",
    architectures=("LlamaForCausalLMEagle3",),
    checkpoints=("AngelSlim/Qwen3-4B_eagle3", "AngelSlim/Qwen3-8B_eagle3"),
    compared="recorded runs of its authors' code",
    aliases={"LlamaForCausalLM": "draft_vocab_size"},
    fields={
        **DECODER,
        "layers": 1,
        "tied": False,
        "shift": 2,
        "kind": Kind.EAGLE,
        "mask_id": None,
        "eos": (),
        "feature_layers": Field((*NESTED_LAYERS.names, *TOP_LAYERS.names), eagle_feature_layers),
        "draft_vocab": field("draft_vocab_size", count, itemgetter("vocab")),
        "norm_features": field("norm_before_fc", flag, False),
        "norm_residual": field("norm_before_residual", flag, False),
    },
    fixed={
        **FIXED_FIELDS,
        **dict.fromkeys(("attention_bias", "mlp_bias"), False),
        "target_hidden_size": itemgetter("dim"),
        f"{EAGLE_KEY}.use_aux_hidden_state": True,
    },
    stated={"num_hidden_layers": 1},
    ignored=IGNORABLE | {"tie_word_embeddings", "eos_token_id", "mask_token_id"},
    flat=flatten_eagle,
    names={
        **replace_prefix(replace_prefix(HUGGING_FACE_NAMES, "model."), "layers.{}", "midlayer"),
        "fusion.weight": "fc.weight",
        "feature_norm.weight": "input_norm.weight",
        "blocks.{}.hidden_norm.weight": "midlayer.hidden_norm.weight",
        **{table: table for table in ("d2t", "t2d")},
    },
    gguf=EAGLE_GGUF,
)
