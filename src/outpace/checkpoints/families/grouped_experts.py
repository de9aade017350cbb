"""Experts in groups beside shared ones, as in DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from outpace.checkpoints.fields import (
    REQUIRED_FIELD,
    Field,
    Fields,
    count,
    few,
    field,
    group,
    number,
)
from outpace.models.config import ExpertGroups


def grouped_experts(
    shared: Field, *, groups: Any = REQUIRED_FIELD, scale: Any = REQUIRED_FIELD
) -> Fields:
    """Return the fields of experts in groups, and of shared experts, which form one MLP.

    Args:
        shared: Field of the number of shared experts.
        groups: Default number of groups, and of those selected.
        scale: Default factor of the experts' sum.
    """

    def shared_width(published: Fields, ours: Fields) -> int:
        return int(shared.read(published, ours) * ours["mlp"])

    sizes = {
        "count": field("n_group", few, groups),
        "chosen": field("topk_group", few, groups),
        "scale": field("routed_scaling_factor", number, scale),
    }
    return {
        "mlp": field("moe_intermediate_size", count),
        "expert_groups": group(ExpertGroups, sizes),
        "shared_mlp": Field(shared.names, shared_width),
        "dense_mlp": field("intermediate_size", count),
        "precise_router": True,
    }
