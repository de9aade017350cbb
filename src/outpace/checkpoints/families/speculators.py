"""EAGLE-3 and DFlash drafts in the format of the library speculators, with nested fields."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.dflash import DFLASH
from outpace.checkpoints.families.eagle import EAGLE
from outpace.checkpoints.families.family import HUGGING_FACE_NAMES, replace_prefix
from outpace.checkpoints.families.nested import (
    DRAFT_VOCABULARY,
    SPECULATOR_ALGORITHM,
    SPECULATOR_IGNORED,
    SPECULATOR_LAYERS,
    SPECULATOR_TYPE,
    flatten_speculator,
    flatten_with_windows,
    is_qwen3,
    speculator_feature_layers,
)
from outpace.checkpoints.fields import Field, Fields, count, field, flag
from outpace.decoding.target import Kind

SPECULATOR_SHARED: Fields = {
    "compared": "the same weights in the plain format",
    "ignored": SPECULATOR_IGNORED,
}
EAGLE_SPECULATOR = replace(
    EAGLE,
    **SPECULATOR_SHARED,
    name="eagle_speculator",
    about="EAGLE-3 as the library speculators writes it",
    architectures=("Eagle3DraftModel", "Eagle3Speculator"),
    checkpoints=("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",),
    aliases={},
    fields={**EAGLE.fields, **DRAFT_VOCABULARY, "qk_norm": field("model_type", is_qwen3)}
    | {"own_embedding": field("embed_requires_grad", flag, False)},
    fixed={**EAGLE.fixed, SPECULATOR_ALGORITHM: "eagle3"},
    stated={**EAGLE.stated, SPECULATOR_TYPE: "eagle3"},
    remote={f"{module}.Eagle3SpeculatorConfig" for module in ("config", "eagle3")},
    flat=flatten_speculator,
    names={
        **EAGLE.names,
        **replace_prefix(HUGGING_FACE_NAMES, "model."),
        "blocks.{}.hidden_norm.weight": "layers.{}.hidden_norm.weight",
    },
)

DFLASH_LAYERS = {
    "feature_layers": Field(SPECULATOR_LAYERS.names, speculator_feature_layers),
    "target_layers": None,
}
DFLASH_SPECULATOR = replace(
    DFLASH,
    **SPECULATOR_SHARED,
    name="dflash_speculator",
    about="DFlash as the library speculators writes it",
    architectures=("DFlashSpeculator",),
    checkpoints=("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",),
    aliases={"DFlashDraftModel": SPECULATOR_TYPE},
    fields={**DFLASH.fields, **DRAFT_VOCABULARY, **DFLASH_LAYERS, "kind": Kind.DFLASH}
    | {"block": field("block_size", count, 8)},
    fixed={name: value for name, value in DFLASH.fixed.items() if name != "draft_vocab_size"}
    | {SPECULATOR_ALGORITHM: "dflash"},
    stated={SPECULATOR_TYPE: "dflash"},
    remote={"config.DFlashSpeculatorConfig"},
    flat=flatten_with_windows,
    names={**DFLASH.names, "d2t": "d2t", "t2d": "t2d"},
)
