"""OLMo 2 and 3: norms after attention and MLP, and over all heads of queries and of keys."""

from __future__ import annotations

from dataclasses import replace

from outpace.checkpoints.families.family import BIASED, NORMS_AFTER, STATED, Family
from outpace.checkpoints.families.ropes import FULL_ROPE, STATED_ROPE, sliding
from outpace.checkpoints.families.windows import alternating
from outpace.checkpoints.fields import Field, Given
from outpace.models.config import Rope


def precise(rope: Field) -> Field:
    """Return a rotary embedding's field with tables in float32 for any dtype."""

    def value(published: Given, ours: Given) -> Rope:
        return replace(rope.value(published, ours), float32=True)

    return Field(rope.names, value)


NORMS = {"qk_norm": True, "wide_qk_norm": True, "norms": "after"}

OLMO2 = Family(
    name="olmo2",
    about="OLMo 2: norms after attention and MLP",
    architectures=("Olmo2ForCausalLM",),
    checkpoints=("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-0325-32B-Instruct"),
    fields={**STATED, **BIASED, **NORMS, "rope": precise(STATED_ROPE)},
    names=NORMS_AFTER,
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
        **STATED,
        **BIASED,
        **NORMS,
        "sights": alternating(4),
        "rope": precise(FULL_ROPE),
        "local_rope": precise(sliding("rope_theta")),
    },
    names=NORMS_AFTER,
)
