"""OLMo 2 and 3: norms after attention and MLP, and over all heads of queries and of keys."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.attention_windows import alternating_windows
from outpace.checkpoints.families.family import BIASES, POST_NORM_NAMES, STRICT_DECODER, Family
from outpace.checkpoints.families.gguf_format import SLIDING_WINDOW_METADATA, GGUFFormat
from outpace.checkpoints.families.rotary import FULL_ROPE, REQUIRED_ROPE, sliding_rope
from outpace.checkpoints.fields import Field, Fields
from outpace.models.config import Rope


def float32_rope(rope: Field) -> Field:
    """Return a rotary embedding's field with tables in float32 for any dtype."""

    def read_value(published: Fields, ours: Fields) -> Rope:
        return replace(rope.read(published, ours), float32=True)

    return Field(rope.names, read_value)


OLMO_NORMS = {"qk_norm": True, "wide_qk_norm": True, "norms": "after"}

OLMO2 = Family(
    name="olmo2",
    about="OLMo 2: norms after attention and MLP",
    architectures=("Olmo2ForCausalLM",),
    checkpoints=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0325-32B-Instruct"),
    fields={**STRICT_DECODER, **BIASES, **OLMO_NORMS, "rope": float32_rope(REQUIRED_ROPE)},
    names=POST_NORM_NAMES,
    gguf=GGUFFormat(architecture="olmo2"),
)

OLMO3 = Family(
    name="olmo3",
    about="OLMo 3: OLMo 2 with windows in three of four layers, without rotary scaling there",
    architectures=("Olmo3ForCausalLM",),
    checkpoints=(
        "allenai/Olmo-3-7B-Instruct",
        "allenai/Olmo-3-7B-Think",
        "allenai/Olmo-3-32B-Think",
    ),
    fields={
        **STRICT_DECODER,
        **BIASES,
        **OLMO_NORMS,
        "windows": alternating_windows(4),
        "rope": float32_rope(FULL_ROPE),
        "local_rope": float32_rope(sliding_rope("rope_theta")),
    },
    names=POST_NORM_NAMES,
    gguf=GGUFFormat(
        architecture="olmo2",
        marker=SLIDING_WINDOW_METADATA,
        stated={"rope.freq_base_swa": lambda fields: fields.get("rope_theta")},
    ),
)
