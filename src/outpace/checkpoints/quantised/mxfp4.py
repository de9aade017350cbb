"""MXFP4: 4-bit floats in blocks that share a power of two (Open Compute Project, MX, 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.checkpoints.fields import Given, refuse_other, refuse_unknown
from outpace.checkpoints.quantised.scheme import Scheme, Source
from outpace.checkpoints.stacks import Entry

BLOCK = 32
"""Elements of a block: 16 bytes, each with the earlier element in its lower half."""

BIAS = 127
"""Bias of the exponent that is stored as a scale."""

PACKED = ("_blocks", "_scales")
"""Suffixes after the name of a stack."""

ABOUT = "experts in MXFP4"
FIXED: Given = {"quant_method": "mxfp4"}
IGNORED = ("modules_to_not_convert", "dequantize")
"""Ignored: the tensors' names show which matrices are quantized."""

HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*HALF, *(-value for value in HALF))


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize `blocks u8[rows, n, 16]` and `scales u8[rows, n]` to `f32[rows, 32 * n]`.

    The result is exact, also in bfloat16. A scale of 255 is NaN.
    """
    pairs = torch.tensor([[VALUES[byte % 16], VALUES[byte // 16]] for byte in range(256)])
    powers = torch.tensor([2.0 ** (byte - BIAS) for byte in range(255)] + [torch.nan])
    values = F.embedding(blocks.int(), pairs.to(blocks.device)).flatten(2)
    scale = F.embedding(scales.int(), powers[:, None].to(blocks.device))
    return values.mul_(scale).flatten(1)


@dataclass(frozen=True)
class MXFP4(Scheme):
    """Stacks of matrices, such as those of experts, whose entries are not transposed."""

    about: str = ABOUT

    @classmethod
    def read(cls, config: Given) -> MXFP4:
        """Read a `quantization_config`; raise `ValueError` for an unsupported field or value."""
        refuse_unknown(config, {*FIXED, *IGNORED}, f"supported: {ABOUT}")
        refuse_other(config, FIXED, {}, f"supported: {ABOUT}")
        return cls()

    def parts(self, source: Source, name: str) -> tuple[str, ...]:
        """Return the names of an entry's blocks and scales; empty if it is not quantized."""
        entry = Entry.of(name)
        if entry is None or entry.stack in source or entry.stack + PACKED[0] not in source:
            return ()
        return tuple(f"{entry.stack}{part}[{entry.number}]" for part in PACKED)

    def plain(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one matrix of a stack."""
        blocks, scales = self.parts(source, name)
        rows, columns = shape
        return dequantised(
            source.stored(blocks, ((rows, columns // BLOCK, BLOCK // 2),), ("U8",)),
            source.stored(scales, ((rows, columns // BLOCK),), ("U8",)),
        )
