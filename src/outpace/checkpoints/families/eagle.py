"""EAGLE-3 drafts: one Llama layer on a target's features (Li et al., 2025)."""

from __future__ import annotations

from operator import itemgetter

from outpace.checkpoints.families.family import DECODER, FIXED, HUGGING_FACE_NAMES, IGNORED, Family
from outpace.checkpoints.fields import Field, Given, count, either, field, flag, indices, inner
from outpace.decoding.target import Kind

OWN, LISTED = "eagle_config", "eagle_aux_hidden_state_layer_ids"
NESTED = field(f"{OWN}.{LISTED}", indices, ())
COUNTED = field(LISTED, indices, ())


def flat(published: Given) -> Given:
    """Move the fields of `eagle_config` to the top level, with that name as a prefix."""
    nested = {f"{OWN}.{name}": value for name, value in inner(published, OWN).items()}
    return {name: value for name, value in published.items() if name != OWN} | nested


def feature_layers(published: Given, ours: Given) -> tuple[int, ...]:
    """Return the target layers whose outputs are read, from 0; the top level lists their inputs."""
    counted = tuple(layer - 1 for layer in COUNTED.value(published, ours))
    listed = either(NESTED.value(published, ours), counted, (*NESTED.names, *COUNTED.names))
    if len(set(listed)) != len(listed) or len(listed) == 1:
        raise ValueError(f"{LISTED} must list several distinct layers, got {[*listed]}")
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
        "kind": Kind.EXTENDING,
        "mask_id": None,
        "eos": (),
        "feature_layers": Field((*NESTED.names, *COUNTED.names), feature_layers),
        "draft_vocab": field("draft_vocab_size", count, itemgetter("vocab")),
        "norm_features": field("norm_before_fc", flag, False),
        "norm_residual": field("norm_before_residual", flag, False),
    },
    fixed={
        **FIXED,
        **dict.fromkeys(("attention_bias", "mlp_bias"), False),
        "target_hidden_size": itemgetter("dim"),
        f"{OWN}.use_aux_hidden_state": True,
    },
    stated={"num_hidden_layers": 1},
    ignored=IGNORED | {"tie_word_embeddings", "eos_token_id"},
    flat=flat,
    names={
        **{
            ours: theirs.replace("model.layers.{}", "midlayer").removeprefix("model.")
            if isinstance(theirs, str)
            else tuple(name.replace("model.layers.{}", "midlayer") for name in theirs)
            for ours, theirs in HUGGING_FACE_NAMES.items()
        },
        "fusion.weight": "fc.weight",
        "feature_norm.weight": "input_norm.weight",
        "blocks.{}.hidden_norm.weight": "midlayer.hidden_norm.weight",
        **{table: table for table in ("d2t", "t2d")},
    },
)
