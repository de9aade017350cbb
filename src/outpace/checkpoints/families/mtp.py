"""Heads for multi-token prediction (MTP): their fields, and what they read.

Facts are from vLLM (https://github.com/vllm-project/vllm, `vllm/model_executor/models/`), SGLang
(https://github.com/sgl-project/sglang, `python/sglang/srt/models/`), llama.cpp
(https://github.com/ggml-org/llama.cpp, `src/models/`) and transformers 5.24 (`MtpModel`):

- Qwen3-Next, Qwen3.5, Qwen3.6: embedding first, then the state after the final norm
  (`qwen3_next_mtp.py` and `qwen3_5_mtp.py` of vLLM, `qwen3_next_mtp.py` of SGLang, `qwen35.cpp`).
- GLM-4.5: the same (`glm4_moe_mtp.py` of vLLM, `glm4_moe_nextn.py` of SGLang, `MtpModel`).
- MiMo: the state first, taken before the final norm, then the embedding (`mimo.py` and
  `mimo_mtp.py` of vLLM, by the authors; `modeling_mimo.py` of the checkpoint has the order).

The head's own state after its norm is its next input, as in all of them but vLLM's GLM-4.5, where
it is taken before. vLLM also zeroes the embedding of a text's second token for GLM-4.5 and MiMo,
which transformers and the code of MiMo's checkpoint do not.
"""

from __future__ import annotations

from typing import Any

from outpace.checkpoints.families.family import TensorNames
from outpace.checkpoints.fields import Field, Fields, few, field
from outpace.models.config import MTPHead


def head_count(value: Any) -> int:
    """Parse a number of heads, which may be 0."""
    return 0 if type(value) is int and value == 0 else few(value)


def mtp_field(names: str, default: int, *, is_last_layer: bool = False, **reads: bool) -> Field:
    """Return the field of the number of heads, `default` if it is missing.

    `is_last_layer` is whether heads are numbered as layers after those of the model. `reads` are
    attributes of `MTPHead`.
    """
    heads = field(names, head_count, default)

    def read_value(published: Fields, ours: Fields) -> MTPHead | None:
        count = heads.read(published, ours)
        index = ours["layers"] if is_last_layer else 0
        return MTPHead(count=count, index=index, **reads) if count else None

    return Field(heads.names, read_value)


def mtp_names(
    layer: TensorNames, prefix: str, *, norm: str, fusion: str, embedding_norm: str, state_norm: str
) -> TensorNames:
    """Return the names of a head: those of its `layer`, and of its other tensors after `prefix`."""
    own = {
        "norm": norm,
        "fusion": fusion,
        "embedding_norm": embedding_norm,
        "state_norm": state_norm,
        "embedding": "embed_tokens",
    }
    blocks = {ours: theirs for ours, theirs in layer.items() if ours.startswith("blocks.")}
    return blocks | {f"{ours}.weight": f"{prefix}{theirs}.weight" for ours, theirs in own.items()}
