"""Dream: Qwen2.5 adapted to bidirectional attention, shifted as Qwen (Ye et al., 2025)."""

from __future__ import annotations

from outpace.checkpoints.families.family import DECODER, HUGGING_FACE_NAMES, Family
from outpace.checkpoints.families.gguf_format import GGUFFormat
from outpace.checkpoints.families.qwen import QWEN_IGNORED
from outpace.checkpoints.fields import field, flag, index
from outpace.decoding.target import Kind

DREAM_TEMPLATE = (
    "{% if messages[0].role != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

DREAM = Family(
    name="dream",
    about="Dream: a diffusion model adapted from Qwen2.5, bidirectional, shifted",
    architectures=("DreamModel",),
    checkpoints=("Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B"),
    compared="recorded runs of its authors' code",
    fields={
        **DECODER,
        "qkv_bias": field("attention_bias", flag, True),
        "mask_id": field("mask_token_id", index),
        "kind": Kind.DIFFUSION,
        "order": "entropy",
        "eps": 1e-3,
        "drawn": True,
    },
    ignored=QWEN_IGNORED,
    remote={"configuration_dream.DreamConfig", "modeling_dream.DreamModel"},
    names=HUGGING_FACE_NAMES,
    method="left_to_right",
    temperature=0.2,
    top_p=0.95,
    template=DREAM_TEMPLATE,
    gguf=GGUFFormat(
        architecture="dream", stated={"attention.causal": False, "diffusion.shift_logits": True}
    ),
)
