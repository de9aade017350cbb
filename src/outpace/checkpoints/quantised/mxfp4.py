"""MXFP4: 4-bit floats in blocks that share a power of two (Open Compute Project, MX, 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.checkpoints.fields import Fields, read_known_fields
from outpace.checkpoints.quantised.scheme import Scheme, TensorSource
from outpace.checkpoints.stacks import StackEntry

MXFP4_BLOCK = 32
"""Elements of a block: 16 bytes, each with the earlier element in its lower half."""

EXPONENT_BIAS = 127
"""Bias of the exponent that is stored as a scale."""

MXFP4_SUFFIXES = ("_blocks", "_scales")
"""Suffixes after the name of a stack."""

MXFP4_ABOUT = "experts in MXFP4"
MXFP4_FIXED: Fields = {"quant_method": "mxfp4"}
MXFP4_IGNORED = ("modules_to_not_convert", "dequantize")
"""Ignored: the tensors' names show which matrices are quantized."""

POSITIVE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_VALUES = (*POSITIVE_VALUES, *(-value for value in POSITIVE_VALUES))


def dequantize_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize `blocks u8[rows, n, 16]` and `scales u8[rows, n]` to `f32[rows, 32 * n]`.

    The result is exact, even in bfloat16. A scale of 255 is NaN.
    """
    pairs = torch.tensor(
        [[MXFP4_VALUES[byte % 16], MXFP4_VALUES[byte // 16]] for byte in range(256)]
    )
    powers = torch.tensor([2.0 ** (byte - EXPONENT_BIAS) for byte in range(255)] + [torch.nan])
    values = F.embedding(blocks.int(), pairs.to(blocks.device)).flatten(2)
    scale = F.embedding(scales.int(), powers[:, None].to(blocks.device))
    return values.mul_(scale).flatten(1)


@dataclass(frozen=True)
class MXFP4(Scheme):
    """Stacks of matrices, such as those of experts, whose entries are not transposed."""

    about: str = MXFP4_ABOUT

    @classmethod
    def from_config(cls, config: Fields) -> MXFP4:
        remedy = f"supported: {MXFP4_ABOUT}"
        read_known_fields({}, config, fixed=MXFP4_FIXED, ignored=MXFP4_IGNORED, remedy=remedy)
        return cls()

    def part_names(self, source: TensorSource, name: str) -> tuple[str, ...]:
        entry = StackEntry.from_name(name)
        if entry is None or entry.stack in source or entry.stack + MXFP4_SUFFIXES[0] not in source:
            return ()
        return tuple(f"{entry.stack}{part}[{entry.number}]" for part in MXFP4_SUFFIXES)

    def read_matrix(self, source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
        blocks, scales = self.part_names(source, name)
        rows, columns = shape
        return dequantize_blocks(
            source.read_stored(
                blocks, ((rows, columns // MXFP4_BLOCK, MXFP4_BLOCK // 2),), ("U8",)
            ),
            source.read_stored(scales, ((rows, columns // MXFP4_BLOCK),), ("U8",)),
        )
