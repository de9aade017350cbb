"""Rows of keys and values as a cache stores them.

A row of int8 is that of one slot and head, and has its float32 scale after its numbers: it depends
on nothing else, and is copied with its scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace.errors import OptionError

SCALE_SIZE = 4
"""Numbers of int8 that hold a scale."""


def stored_size(size: int, dtype: torch.dtype) -> int:
    """Return how many numbers of a dtype store a head of some size."""
    if dtype != torch.int8:
        return size
    if size % SCALE_SIZE:
        reason = f"requires heads of a multiple of {SCALE_SIZE} numbers, got {size}: omit it"
        raise OptionError("cache_dtype", "int8", reason)
    return size + SCALE_SIZE


def head_size(cached: Tensor) -> int:
    """Return the size of the heads that a cache `[S, K, …]` stores."""
    return cached.shape[-1] - stored_size(0, cached.dtype)


def write_rows(cached: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Store `rows [n, K, D]` in slots of a cache `[S, K, …]`, rounded to its dtype."""
    if cached.dtype == torch.int8:
        rows = quantize_rows(rows.float())
    cached.index_copy_(0, slots, rows.to(cached.dtype))


def quantize_rows(rows: Tensor) -> Tensor:
    """Return float32 `rows [n, K, D]` as int8 with their scales, `[n, K, D + 4]`."""
    scales = rows.abs().amax(-1, keepdim=True).div_(127)
    scales.clamp_(min=torch.finfo(torch.float32).tiny)  # NaN stays NaN
    stored = rows.new_empty(*rows.shape[:-1], rows.shape[-1] + SCALE_SIZE, dtype=torch.int8)
    stored[..., :-SCALE_SIZE] = (rows / scales).round_()
    stored.view(torch.float32)[..., -1:] = scales
    return stored


def read_rows(cached: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows `[n, K, D]` of slots of a cache, in a dtype."""
    rows = cached[slots]
    if cached.dtype == torch.int8:
        rows = rows[..., :-SCALE_SIZE] * rows.view(torch.float32)[..., -1:]
    return rows.to(dtype)
