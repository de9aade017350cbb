"""Memory for the keys and values of all layers of a model."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from outpace.errors import OptionError
from outpace.models.config import ModelConfig


def allocate_layers(
    config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return zeroed memory, and the keys and values of each layer in it.

    Layers of one shape share a tensor `[2, layers, slots, kv_heads, head_dim]`; keys and values
    are `[slots, kv_heads, head_dim]`.
    """
    shapes = config.kv_shapes
    memories: list[Tensor] = []
    layers: dict[tuple[int, int], Iterator[tuple[Tensor, Tensor]]] = {}
    for heads, size in dict.fromkeys(shapes):
        # The slots of a head are contiguous, since attention reads them in order.
        shape = 2, shapes.count((heads, size)), heads, slots, size
        memories.append(zero_memory(shape, dtype, device).transpose(2, 3))
        keys, values = memories[-1]
        layers[heads, size] = zip(keys, values, strict=True)
    keys_values = [next(layers[shape]) for shape in shapes]
    return memories, [keys for keys, _ in keys_values], [values for _, values in keys_values]


def zero_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed memory: attention may read unwritten slots, at weight zero."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        # PyTorch would write all of it; the operating system maps zeroed pages on first use. NumPy
        # would ask for pages of 2 MiB: one for each layer and head, at the first token.
        blank = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
    except (OSError, OverflowError, ValueError) as error:
        message = (
            f"no memory for {size / 2**30:.3g} GiB of keys and values: give a smaller cache_gib"
        )
        raise OptionError("cache_gib", size / 2**30, f"cache_gib: {message}") from error
    return torch.frombuffer(blank, dtype=dtype).view(shape)
