"""Numbers of four bits in blocks that share a power of two (Open Compute Project, MX, 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.checkpoints.fields import Given, refuse_other, refuse_unknown
from outpace.checkpoints.quantised.scheme import Scheme, Source
from outpace.checkpoints.stacks import Entry

BLOCK = 32
"""Numbers of a block: 16 bytes, the earlier number of a byte in its lower half."""

BIAS = 127
"""What is taken off the byte of a scale to make the exponent of two."""

PACKED = ("_blocks", "_scales")
"""What stands behind the name of a stack."""

ABOUT = "experts in MXFP4"
FIXED: Given = {"quant_method": "mxfp4"}
IGNORED = ("modules_to_not_convert", "dequantize")
"""Which matrices are quantised is seen by their names."""

HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*HALF, *(-value for value in HALF))


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrix `f32[rows, 32 * n]` of `blocks u8[rows, n, 16]` and `scales u8[rows, n]`.

    Nothing is rounded, and nothing would be in bfloat16. A scale of 255 stands for no number.
    """
    pairs = torch.tensor([[VALUES[byte % 16], VALUES[byte // 16]] for byte in range(256)])
    powers = torch.tensor([2.0 ** (byte - BIAS) for byte in range(255)] + [torch.nan])
    values = F.embedding(blocks.int(), pairs.to(blocks.device)).flatten(2)
    scale = F.embedding(scales.int(), powers[:, None].to(blocks.device))
    return values.mul_(scale).flatten(1)


@dataclass(frozen=True)
class MXFP4(Scheme):
    """Stacks of matrices, such as those of experts, whose entries are not turned."""

    about: str = ABOUT

    @classmethod
    def read(cls, given: Given) -> MXFP4:
        """From a `quantization_config`; `ValueError` for a field or value that is not known."""
        refuse_unknown(given, {*FIXED, *IGNORED}, f"what loads is {ABOUT}")
        refuse_other(given, FIXED, {}, f"what loads is {ABOUT}")
        return cls()

    def parts(self, source: Source, name: str) -> tuple[str, ...]:
        """Blocks and scales of an entry; none of one that is plain."""
        entry = Entry.of(name)
        if entry is None or entry.stack in source or entry.stack + PACKED[0] not in source:
            return ()
        return tuple(f"{entry.stack}{part}[{entry.number}]" for part in PACKED)

    def plain(self, source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
        """One matrix of a stack."""
        blocks, scales = self.parts(source, name)
        rows, columns = shape
        return dequantised(
            source.stored(blocks, ((rows, columns // BLOCK, BLOCK // 2),), ("U8",)),
            source.stored(scales, ((rows, columns // BLOCK),), ("U8",)),
        )
