"""Llama 3 and models that share its format."""

from __future__ import annotations

from outpace.checkpoints.families.family import BIASES, DECODER, HUGGING_FACE_NAMES, Family
from outpace.checkpoints.families.gguf_format import GGUFFormat
from outpace.checkpoints.families.gguf_orders import PAIRED_ROWS
from outpace.checkpoints.fields import field, flag

LLAMA = Family(
    name="llama",
    about="Llama 3, 3.1, 3.2: no biases, rotary scaling for long contexts",
    architectures=("LlamaForCausalLM",),
    checkpoints=(
        "meta-llama/Meta-Llama-3-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.2-1B",
    ),
    fields={**DECODER, **BIASES, "mlp_bias": field("mlp_bias", flag, False)},
    names=HUGGING_FACE_NAMES,
    gguf=GGUFFormat(architecture="llama", rows=PAIRED_ROWS),
)
