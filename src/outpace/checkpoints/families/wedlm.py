"""WeDLM: Qwen2.5 or Qwen3 that also fills masks, still causal (Liu et al., 2025).

Two kinds of rows: a token's row predicts the next slot, as in the model that it was made from; a
mask's row predicts its own.
"""

from __future__ import annotations

from outpace.checkpoints.families.family import DECODER, HUGGING_FACE_NAMES, Family, mask
from outpace.checkpoints.families.qwen import QWEN_IGNORED
from outpace.checkpoints.fields import field, flag

PARTS = ("Model", "ForCausalLM")
MASK = 151665
"""What the published models feed as a mask, named in `config.json` or not."""


WEDLM = Family(
    name="wedlm",
    about="WeDLM: fills masks under causal attention, adapted from Qwen2.5 or Qwen3",
    architectures=("WeDLMForCausalLM",),
    checkpoints=("tencent/WeDLM-7B-Instruct", "tencent/WeDLM-8B", "tencent/WeDLM-8B-Instruct"),
    compared="recorded runs of its authors' code",
    fields={
        **DECODER,
        "mask_id": mask(MASK),
        "qkv_bias": field("attention_bias", flag, True),
        "qk_norm": field("qk_norm", flag, lambda ours: not ours["qkv_bias"]),
    },
    ignored=QWEN_IGNORED,
    remote={"configuration_wedlm.WeDLMConfig", *(f"modeling_wedlm.WeDLM{part}" for part in PARTS)},
    names=HUGGING_FACE_NAMES,
    method="wedlm",
)
