"""SDLM: Qwen2.5 that fills a block after its last token, shifted as Qwen (Liu et al., 2025)."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.qwen import QWEN2
from outpace.checkpoints.fields import count, field, index
from outpace.decoding.target import Kind

SDLM = replace(
    QWEN2,
    name="sdlm",
    about="SDLM: a causal model that fills a block after its last token, adapted from Qwen2.5",
    architectures=("SDLMQwen2ForCausalLM",),
    checkpoints=("OpenGVLab/SDLM-3B-D4", "OpenGVLab/SDLM-3B-D8", "OpenGVLab/SDLM-32B-D4"),
    compared="transformers under its mask",
    fields={
        **QWEN2.fields,
        "mask_id": field("text_mask_token_id", index),
        "mask_shift": 1,
        "kind": Kind.CAUSAL_BLOCK,
        "block": field("block_size", count),
        "drawn": True,
    },
    # Whether rows of the block are causal too, in the spelling of the files and that of the code.
    fixed={**QWEN2.fixed, "casual_attn": False, "causal_attn": False},
    ignored={*QWEN2.ignored, "text_mask_token"},
    remote={"configuration_sdlm.SDLMQwen2Config", "modeling_sdlm.SDLMQwen2ForCausalLM"},
    method="block_diffusion",
    gguf=None,
)
