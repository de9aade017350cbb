"""gpt-oss: windows in every other layer, attention sinks, experts in MXFP4 or bfloat16."""

from __future__ import annotations

from outpace.checkpoints.families.attention_windows import alternating_windows
from outpace.checkpoints.families.family import (
    FIXED_FIELDS,
    HUGGING_FACE_NAMES,
    IGNORABLE,
    STRICT_DECODER,
    Family,
)
from outpace.checkpoints.families.gguf_format import GGUFFormat, alternate_halves
from outpace.checkpoints.fields import few, field, flag

GPT_OSS_MLP = "model.layers.{}.mlp."

GPT_OSS = Family(
    name="gpt_oss",
    about="gpt-oss: experts, also in MXFP4, windows in every other layer, sinks",
    architectures=("GptOssForCausalLM",),
    checkpoints=("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    fields={
        **STRICT_DECODER,
        **dict.fromkeys(("qkv_bias", "out_bias"), field("attention_bias", flag, True)),
        "head_dim": field("head_dim", few),
        "windows": alternating_windows(2),
        "sinks": True,
        "experts": field("num_local_experts", few),
        "experts_per_row": field("num_experts_per_tok", few),
        "norm_experts": True,
        "mlp_bias": True,
        "activation": "clamped",
    },
    fixed={
        **FIXED_FIELDS,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "experts_per_token": lambda ours: ours["experts_per_row"],
    },
    ignored=IGNORABLE | {"router_aux_loss_coef", "output_router_logits", "initial_context_length"},
    names={
        **HUGGING_FACE_NAMES,
        "blocks.{}.attention.sinks": "model.layers.{}.self_attn.sinks",
        **{
            f"blocks.{{}}.mlp.router.{part}": f"{GPT_OSS_MLP}router.{part}"
            for part in ("weight", "bias")
        },
        "blocks.{}.mlp.experts.{}.gate_up.weight": GPT_OSS_MLP + "experts.gate_up_proj[{}].T",
        "blocks.{}.mlp.experts.{}.gate_up.bias": GPT_OSS_MLP + "experts.gate_up_proj_bias[{}]",
        "blocks.{}.mlp.experts.{}.down.weight": GPT_OSS_MLP + "experts.down_proj[{}].T",
        "blocks.{}.mlp.experts.{}.down.bias": GPT_OSS_MLP + "experts.down_proj_bias[{}]",
    },
    gguf=GGUFFormat(
        architecture="gpt-oss",
        renamed={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        scaling={"truncate": False},
        rows=dict.fromkeys(("gate_up_proj", "gate_up_proj_bias"), alternate_halves),
        tensors={
            "self_attn.sinks": ("self_attn.sinks.weight",),
            **{
                f"experts.{ours}_proj{end}": tuple(
                    f"experts.{part}_proj.{kind}" for part in ours.split("_")
                )
                for ours in ("gate_up", "down")
                for end, kind in (("", "weight"), ("_bias", "bias"))
            },
        },
    ),
)
