"""EAGLE-3 and DFlash drafts in the format of the library speculators, with nested fields."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.dflash import DFLASH
from outpace.checkpoints.families.eagle import EAGLE
from outpace.checkpoints.families.family import HUGGING_FACE_NAMES, without_prefix
from outpace.checkpoints.families.nested import (
    ALGORITHM,
    COUNTED,
    IGNORED,
    KIND,
    VOCABULARY,
    feature_layers,
    flat,
    is_qwen3,
    with_sights,
)
from outpace.checkpoints.fields import Field, Given, count, field, flag
from outpace.decoding.target import Kind

SHARED: Given = {"compared": "the same weights in the plain format", "ignored": IGNORED}
EAGLE_SPECULATOR = replace(
    EAGLE,
    **SHARED,
    name="eagle_speculator",
    about="EAGLE-3 as the library speculators writes it",
    architectures=("Eagle3DraftModel", "Eagle3Speculator"),
    checkpoints=("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",),
    aliases={},
    fields={**EAGLE.fields, **VOCABULARY, "qk_norm": field("model_type", is_qwen3)}
    | {"own_embedding": field("embed_requires_grad", flag, False)},
    fixed={**EAGLE.fixed, ALGORITHM: "eagle3"},
    stated={**EAGLE.stated, KIND: "eagle3"},
    remote={f"{module}.Eagle3SpeculatorConfig" for module in ("config", "eagle3")},
    flat=flat,
    names={
        **EAGLE.names,
        **without_prefix(HUGGING_FACE_NAMES, "model."),
        "blocks.{}.hidden_norm.weight": "layers.{}.hidden_norm.weight",
    },
)

LAYERS = {"feature_layers": Field(COUNTED.names, feature_layers), "target_layers": None}
DFLASH_SPECULATOR = replace(
    DFLASH,
    **SHARED,
    name="dflash_speculator",
    about="DFlash as the library speculators writes it",
    architectures=("DFlashSpeculator",),
    checkpoints=("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",),
    aliases={"DFlashDraftModel": KIND},
    fields={**DFLASH.fields, **VOCABULARY, **LAYERS, "kind": Kind.DRAFT}
    | {"block": field("block_size", count, 8)},
    fixed={name: value for name, value in DFLASH.fixed.items() if name != "draft_vocab_size"}
    | {ALGORITHM: "dflash"},
    stated={KIND: "dflash"},
    remote={"config.DFlashSpeculatorConfig"},
    flat=with_sights,
    names={**DFLASH.names, "d2t": "d2t", "t2d": "t2d"},
)
