"""Numbers of four bits in blocks that share a power of two (Open Compute Project, MX, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32
"""Numbers of a block: 16 bytes, the earlier number of a byte in its lower half."""

BIAS = 127
"""What is taken off the byte of a scale to make the exponent of two."""

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
