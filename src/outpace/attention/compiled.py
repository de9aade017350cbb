"""Attention over cached slots by a compiled CPU loop (attend.c), one call per layer for all rows.

Sums are accumulated in float32, in an order that is fixed for each row. The result of a row is
therefore bit-identical whatever else a call contains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int, c_long, c_void_p

import numpy as np
import torch
from torch import Tensor

from outpace.attention.batch import Batch, Span
from outpace.attention.dense import Dense
from outpace.attention.plan import Numbers, seen_by, tables, unknown
from outpace.kernels.loader import library, threads
from outpace.kernels.tiles import check_vector, describe
from outpace.models.config import Sight
from outpace.models.transformer import Attend

ROWS = 16
"""Rows of a sequence that read a page together."""

LANES, WIDEST, PAGE = 16, 256, 16
"""Required divisor of the head size, its maximum, and the slots per page."""


class Pass(Structure):
    """Arguments of the loop for one layer; see attend.c."""

    _fields_ = [
        ("half", c_int),
        *((name, c_long) for name in ("heads", "kv_heads", "size")),
        *((name, c_void_p) for name in ("q", "keys", "values")),
        *((name, c_long) for name in ("q_row", "q_head", "slot", "head")),
        *((name, c_void_p) for name in ("pages", "tables", "chunks")),
        ("num_chunks", c_long),
        *((name, c_void_p) for name in ("low", "stop", "trunk", "bits", "own", "sinks", "out")),
        ("scale", c_float),
        ("threads", c_int),
    ]


def missing(device: torch.device) -> str | None:
    """Return why the loop cannot run on a device, or None if it can."""
    if device.type != "cpu":
        return f"it requires a CPU, got {device.type}"
    if (loaded := library()) is None:
        return "it was not compiled during the installation of outpace"
    return None if loaded.outpace_can_attend() else "this processor has no AVX512"


def unfit(keys: Tensor, sights: Sequence[Sight], page: int) -> str | None:
    """Return why the loop cannot attend over a cache of `keys [S, K, D]`, or None if it can."""
    if reason := missing(keys.device):
        return reason
    if keys.dtype not in (torch.float32, torch.bfloat16):
        return f"it supports float32 and bfloat16, got {keys.dtype}"
    if (size := keys.shape[-1]) % LANES or size > WIDEST:
        return f"the head size must be a multiple of {LANES} up to {WIDEST}, got {size}"
    if field := unknown(Sight, sights, {"window", "causal"}):
        return f"it does not support the {field} of a layer's attention window"
    return None if page == PAGE else f"pages must have {PAGE} slots, got {page}"


class Compiled:
    """Plan a pass as arrays and run it layer by layer over the cache of `dense`."""

    def __init__(self, dense: Dense) -> None:
        self.keys, self.values, self.sights = dense.keys, dense.values, dense.sights
        _, self.kv_heads, self.size = dense.keys[0].shape
        if len({(t.shape, t.stride(), t.dtype) for t in (*self.keys, *self.values)}) > 1:
            raise ValueError("keys and values of all layers must have one shape, layout and dtype")
        if self.keys[0].stride(-1) != 1:
            raise ValueError("the elements of a key must be contiguous")
        self.heads = self.kv_heads * dense.sharing
        self.kinds = list(dict.fromkeys(self.sights))

    def numbers(self, spans: Sequence[Span]) -> list[Numbers]:
        """Return pages, table start per chunk, chunk starts with the total, and visible bounds.

        The bounds of all rows follow once per distinct attention window.
        """
        pages, begins = tables(spans, PAGE)
        chunks = [np.arange(span.rows.start, span.rows.stop, ROWS) for span in spans]
        of_chunks = np.repeat(begins, list(map(len, chunks)))
        wanted = [pages, of_chunks, np.concatenate([*chunks, [spans[-1].rows.stop]])]
        return wanted + [seen_by(spans, layer_window).ravel() for layer_window in self.kinds]

    def plan(self, batch: Batch) -> Attend:
        """Do the work that all layers of a pass share; return the `attend` of its layers."""
        pages, of_chunks, chunks, *seen = batch.numbers
        rows = int(chunks[-1])
        total = sum(len(span) * span.seen for span in batch.spans)
        keys = self.keys[0]
        common = {
            "half": keys.dtype == torch.bfloat16,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "size": self.size,
            "slot": keys.stride(0),
            "head": keys.stride(1),
            "pages": pages.data_ptr(),
            "tables": of_chunks.data_ptr(),
            "chunks": chunks.data_ptr(),
            "num_chunks": len(of_chunks),
            "scale": math.log2(math.e) / math.sqrt(self.size),
            "threads": threads(2 * total * self.heads * self.size),
        }
        passes: dict[Sight, Pass] = {}
        for layer_window, numbers in zip(self.kinds, seen, strict=True):
            names = ("low", "stop", "trunk", "bits", "own")
            parts = {
                n: part.data_ptr() for n, part in zip(names, numbers.split(rows), strict=False)
            }
            passes[layer_window] = Pass(**common, **parts)
        loaded, wanted = library(), (rows, self.heads, self.size)
        assert loaded is not None

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            if q.shape != wanted or q.dtype != keys.dtype or not q.is_cpu:
                raise ValueError(f"q must be {wanted} of {keys.dtype}, got {describe(q)}")
            keys.index_copy_(0, batch.write, k)
            values.index_copy_(0, batch.write, v)
            q = q if q.stride(-1) == 1 else q.contiguous()
            own, out = passes[self.sights[layer]], torch.empty(q.shape, dtype=q.dtype)
            sinks = None if sinks is None else check_vector("sinks", sinks.float(), self.heads)
            own.q, own.q_row, own.q_head = q.data_ptr(), q.stride(0), q.stride(1)
            own.keys, own.values, own.out = keys.data_ptr(), values.data_ptr(), out.data_ptr()
            own.sinks = None if sinks is None else sinks.data_ptr()
            loaded.outpace_attend(addressof(own))
            return out

        return attend
