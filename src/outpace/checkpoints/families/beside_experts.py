"""Fields of experts that are added to an MLP, as in Gemma 4."""

from __future__ import annotations

from outpace.checkpoints.fields import Field, Fields, count, few, field, flag, shorten

MIXES = field("enable_moe_block", flag, False)
NAMES = "num_experts", "top_k_experts", "moe_intermediate_size"
SIZES = (field(NAMES[0], few), field(NAMES[1], few), field(NAMES[2], count))
WIDTH = field("intermediate_size", count)


def mixture_field(size: Field) -> Field:
    """Return the field of a size of the mixture: 0 in a model without one."""

    def read_value(published: Fields, ours: Fields) -> int:
        if ours["experts_beside"]:
            return int(size.read(published, ours))
        (name,) = size.names
        if size is not WIDTH and published.get(name):
            raise ValueError(f"{name} is {shorten(published[name])} without enable_moe_block")
        return 0

    return Field(size.names, read_value)


def read_width(published: Fields, ours: Fields) -> int:
    """Read the width of an expert, or that of the MLP in a model without experts."""
    width = SIZES[2] if ours["experts_beside"] else WIDTH
    return int(width.read(published, ours))


BESIDE_EXPERTS: Fields = {
    "experts_beside": MIXES,
    "experts": mixture_field(SIZES[0]),
    "experts_per_row": mixture_field(SIZES[1]),
    "norm_experts": lambda ours: ours["experts_beside"],
    "mlp": Field((*WIDTH.names, *SIZES[2].names), read_width),
    "dense_mlp": mixture_field(WIDTH),
}
