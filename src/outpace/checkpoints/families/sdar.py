"""SDAR: Qwen3 adapted to attend to whole blocks, not shifted (Cheng et al., 2025)."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.family import CLASS_SUFFIXES, mask_id
from outpace.checkpoints.families.qwen import QWEN3, QWEN3_MOE
from outpace.checkpoints.fields import Fields, count, field, words
from outpace.decoding.target import Kind

SDAR_MASK = 151669
"""Mask token in the authors' code, `<|MASK|>` of their tokenizer."""
SDAR_TRAINING = words("debug ep_size fuse_cross_entropy micro_forward skip_checkpoint use_deepep")

SDAR_FIELDS: Fields = {
    "shift": 0,
    "kind": Kind.BLOCK,
    "mask_id": mask_id(SDAR_MASK),
    "block": field("block_size", count, None),
    "drawn": True,
}

SDAR = replace(
    QWEN3,
    name="sdar",
    about="SDAR (dense): block diffusion, adapted from Qwen3, not shifted",
    architectures=("SDARForCausalLM",),
    checkpoints=("JetLM/SDAR-1.7B-Chat", "JetLM/SDAR-4B-Chat", "JetLM/SDAR-8B-Chat"),
    compared="recorded runs of its authors' code",
    fields={**QWEN3.fields, **SDAR_FIELDS},
    ignored={*QWEN3.ignored, *SDAR_TRAINING},
    remote={
        "configuration_sdar.SDARConfig",
        *(f"modeling_sdar.SDAR{part}" for part in CLASS_SUFFIXES),
    },
    method="block_diffusion",
    gguf=None,
    temperature=1.0,
)

SDAR_MOE = replace(
    SDAR,
    name="sdar_moe",
    about="SDAR, mixtures of experts in every layer",
    architectures=("SDARMoeForCausalLM",),
    checkpoints=("JetLM/SDAR-30B-A3B-Chat",),
    compared="transformers under a mask in blocks",
    fields={**QWEN3_MOE.fields, **SDAR_FIELDS},
    fixed=QWEN3_MOE.fixed,
    ignored={*QWEN3_MOE.ignored, *SDAR_TRAINING},
    remote={
        "configuration_sdar_moe.SDARMoeConfig",
        *(f"modeling_sdar_moe.SDARMoe{part}" for part in CLASS_SUFFIXES),
    },
    names=QWEN3_MOE.names,
)
