"""Qwen3-Next: gated delta layers beside gated attention, mixtures of experts."""

from __future__ import annotations

from outpace.checkpoints.families.family import IGNORABLE, Family
from outpace.checkpoints.families.hybrid import HYBRID, MIXTURE, delta_field
from outpace.checkpoints.families.hybrid_gguf import QWEN3_NEXT_GGUF
from outpace.checkpoints.families.hybrid_names import GROUPED_NAMES, MIXTURE_NAMES, hybrid_mtp
from outpace.checkpoints.fields import field, flag, words

QWEN3_NEXT = Family(
    name="qwen3_next",
    about="Qwen3-Next: gated delta layers beside gated attention, mixtures of experts",
    architectures=("Qwen3NextForCausalLM",),
    checkpoints=("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Coder-Next"),
    fields={
        **HYBRID,
        **MIXTURE,
        "norm_experts": field("norm_topk_prob", flag, True),
        "delta": delta_field(grouped=True),
    },
    fixed={"hidden_act": "silu", "decoder_sparse_step": 1},
    ignored=IGNORABLE | words("intermediate_size router_aux_loss_coef output_router_logits"),
    names={**MIXTURE_NAMES, **GROUPED_NAMES},
    gguf=QWEN3_NEXT_GGUF,
    mtp=hybrid_mtp(MIXTURE_NAMES),
)
