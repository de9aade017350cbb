"""Packing of groups of 4-bit codes into blocks of 32 inputs, without loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.checkpoints.quantised.scheme import GroupedCodes
from outpace.kernels.int4 import MAX_INT4_CODE, build_int4_blocks, pack_blocks
from outpace.kernels.packed import PACKED_BLOCK, PackedMatrix


class PackingError(Exception):
    """Groups that cannot be packed without loss; the message is the reason."""


def pack_groups(parts: Sequence[GroupedCodes]) -> PackedMatrix:
    """Pack a matrix from the groups of its parts, stacked.

    Inputs in an order other than that of their groups are reordered.

    Raises:
        PackingError: If the packed matrix would differ from the dequantized one.
    """
    orders = [order_by_group(part.group) for part in parts]
    first = orders[0]
    if not all(
        order is first or (order is not None and first is not None and torch.equal(order, first))
        for order in orders
    ):
        raise PackingError("matrices that are stacked here order their inputs differently")
    packed = pack_blocks([convert_groups(part, first) for part in parts], "INT4", first)
    assert packed is not None  # scales are finite
    return packed


def order_by_group(group: Tensor | None) -> Tensor | None:
    """Return the inputs ordered by group, `i64[in]`; None if they are in order."""
    if group is None or bool((group.diff() >= 0).all()):
        return None
    return group.argsort(stable=True)


def convert_groups(part: GroupedCodes, order: Tensor | None) -> Tensor:
    """Convert groups to blocks `u8[out, blocks, 19]`, with the inputs in this order.

    Raises:
        PackingError: If the blocks would differ from the groups.
    """
    inputs = part.codes.shape[1]
    if inputs % PACKED_BLOCK:
        raise PackingError(f"{inputs} inputs are not a multiple of {PACKED_BLOCK}")
    codes = part.codes if order is None else part.codes[:, order]
    zero = torch.zeros_like(part.scale) if part.zero is None else part.zero
    scale = part.scale.half()
    if not torch.equal(scale.float(), part.scale):
        raise PackingError("scales are not exact in float16")
    for numbers in (codes, zero):
        low, high = (int(number) - part.lowest for number in numbers.aminmax())
        if low < 0 or high > MAX_INT4_CODE:
            raise PackingError("codes or zero points have more than 4 bits")
    codes, zero = ((numbers - part.lowest).to(torch.uint8) for numbers in (codes, zero))
    blocks = inputs // PACKED_BLOCK
    if part.group is None:
        return build_int4_blocks(codes, scale.expand(-1, blocks), zero.expand(-1, blocks))
    group = (part.group if order is None else part.group[order]).view(blocks, PACKED_BLOCK)
    if not torch.equal(group, group[:, :1].expand_as(group)):
        raise PackingError(f"a group does not end after a multiple of {PACKED_BLOCK} inputs")
    return build_int4_blocks(codes, scale[:, group[:, 0]], zero[:, group[:, 0]])
