"""Phi-3 and Phi-4: published with stacked projections, as used here."""

from __future__ import annotations

from outpace.checkpoints.families.attention_windows import sliding_windows
from outpace.checkpoints.families.family import (
    HUGGING_FACE_NAMES,
    IGNORABLE,
    STRICT_DECODER,
    Family,
)
from outpace.checkpoints.families.gguf_format import GGUFFormat

PHI3 = Family(
    name="phi3",
    about="Phi-3 and Phi-4 (14B): stacked projections, windows in some",
    architectures=("Phi3ForCausalLM",),
    checkpoints=("microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4"),
    fields={**STRICT_DECODER, "windows": sliding_windows(None)},
    # The trained length only matters for rotary scaling by it, which is not supported.
    ignored=IGNORABLE | {"original_max_position_embeddings"},
    remote={"configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"},
    names={
        **HUGGING_FACE_NAMES,
        "blocks.{}.attention.qkv.weight": "model.layers.{}.self_attn.qkv_proj.weight",
        "blocks.{}.mlp.gate_up.weight": "model.layers.{}.mlp.gate_up_proj.weight",
    },
    gguf=GGUFFormat(architecture="phi3"),
)
