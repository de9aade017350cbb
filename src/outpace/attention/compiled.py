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

from outpace.attention.batch import AttentionBatch, RowSpan
from outpace.attention.bounds import PlanArray, page_tables, row_bounds
from outpace.attention.cached import head_size, write_rows
from outpace.attention.dense import DenseAttention
from outpace.kernels.loader import Isa, has_isa, load_library, thread_count
from outpace.kernels.tiles import check_vector, describe_tensor
from outpace.models.attention import Attend
from outpace.models.config import AttentionWindow

CHUNK_ROWS, CHUNK_HEADS = 12, 8
"""Rows of a sequence and heads that read a page together; of fewer heads, more rows. Their product
is the most that attend.c holds (STATES)."""

QUERY_DTYPES = torch.float32, torch.bfloat16

CACHE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
"""Numbers of the cache, as attend.c counts them."""

HEAD_SIZE_MULTIPLE, MAX_LOOP_HEAD_SIZE, LOOP_PAGE_SLOTS = 16, 256, 16
"""Required divisor of the head size, its maximum, and the slots per page."""


ATTENTION_LOOPS = Isa.AVX512, Isa.AVX2, Isa.NEON
"""Instruction sets with loops, fastest first."""


class AttendArguments(Structure):
    """Arguments of the loop for one layer; see attend.c."""

    _fields_ = [
        *((name, c_int) for name in ("isa", "half", "cached")),
        *((name, c_long) for name in ("heads", "kv_heads", "size")),
        *((name, c_void_p) for name in ("q", "keys", "values")),
        *((name, c_long) for name in ("q_row", "q_head", "slot", "head")),
        *((name, c_void_p) for name in ("pages", "tables", "chunks")),
        ("num_chunks", c_long),
        *((name, c_void_p) for name in ("low", "stop", "trunk", "bits", "own", "sinks", "out")),
        ("scale", c_float),
        ("threads", c_int),
    ]


def compiled_missing_reason(device: torch.device) -> str | None:
    """Return why the loop cannot run on a device, or None if it can."""
    if device.type != "cpu":
        return f"it requires a CPU, got {device.type}"
    if load_library() is None:
        return "it was not compiled during the installation of outpace"
    return None if find_attention_loop() else "this processor has neither AVX2 nor Arm's dotprod"


def find_attention_loop() -> Isa | None:
    return next(filter(has_isa, ATTENTION_LOOPS), None)


def compiled_unfit_reason(keys: Tensor, page: int, dtype: torch.dtype) -> str | None:
    """Return why the loop cannot attend over `keys [S, K, D]` in a `dtype`, or None if it can."""
    if reason := compiled_missing_reason(keys.device):
        return reason
    if dtype not in QUERY_DTYPES:
        return f"it supports float32 and bfloat16, got {dtype}"
    if keys.dtype not in CACHE_DTYPES:
        return f"it supports caches of {', '.join(map(str, CACHE_DTYPES))}, got {keys.dtype}"
    if (size := head_size(keys)) % HEAD_SIZE_MULTIPLE or size > MAX_LOOP_HEAD_SIZE:
        return (
            f"the head size must be a multiple of {HEAD_SIZE_MULTIPLE} up to "
            f"{MAX_LOOP_HEAD_SIZE}, got {size}"
        )
    return (
        None if page == LOOP_PAGE_SLOTS else f"pages must have {LOOP_PAGE_SLOTS} slots, got {page}"
    )


class CompiledAttention:
    """Plan a pass as arrays and run it layer by layer over the cache of `dense`."""

    def __init__(self, dense: DenseAttention) -> None:
        self.keys, self.values, self.attention_windows = (
            dense.keys,
            dense.values,
            dense.attention_windows,
        )
        self.kv_heads, self.size = dense.keys[0].shape[1], head_size(dense.keys[0])
        if len({(t.shape, t.stride(), t.dtype) for t in (*self.keys, *self.values)}) > 1:
            raise ValueError("keys and values of all layers must have one shape, layout and dtype")
        if self.keys[0].stride(-1) != 1:
            raise ValueError("the elements of a key must be contiguous")
        self.dtype = dense.dtype
        self.loop = find_attention_loop()
        self.heads = self.kv_heads * dense.heads_per_kv_head
        self.chunk_rows = CHUNK_ROWS * max(CHUNK_HEADS // dense.heads_per_kv_head, 1)
        self.distinct_windows = list(dict.fromkeys(self.attention_windows))

    @property
    def num_arrays(self) -> int:
        return 3 + len(self.distinct_windows)

    def plan_arrays(self, spans: Sequence[RowSpan]) -> list[PlanArray]:
        """Return pages, table start per chunk, chunk starts with the total, and visible bounds.

        The bounds of all rows follow once per distinct attention window.
        """
        pages, begins = page_tables(spans, LOOP_PAGE_SLOTS)
        chunks = [np.arange(span.rows.start, span.rows.stop, self.chunk_rows) for span in spans]
        of_chunks = np.repeat(begins, list(map(len, chunks)))
        wanted = [pages, of_chunks, np.concatenate([*chunks, [spans[-1].rows.stop]])]
        return wanted + [
            row_bounds(spans, layer_window).ravel() for layer_window in self.distinct_windows
        ]

    def plan_pass(self, batch: AttentionBatch) -> Attend:
        pages, of_chunks, chunks, *seen = batch.plan_arrays
        rows = int(chunks[-1])
        total = sum([len(span) * span.num_visible for span in batch.spans])
        keys = self.keys[0]
        # Equal in all layers; each adds its own addresses, just before it runs.
        common = {
            "isa": self.loop,
            "half": self.dtype == torch.bfloat16,
            "cached": CACHE_DTYPES[keys.dtype],
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "size": self.size,
            "slot": keys.stride(0),
            "head": keys.stride(1),
            "pages": pages.data_ptr(),
            "tables": of_chunks.data_ptr(),
            "chunks": chunks.data_ptr(),
            "num_chunks": len(of_chunks),
            # The loop computes powers of two, which are faster than those of e.
            "scale": math.log2(math.e) / math.sqrt(self.size),
            "threads": thread_count(2 * total * self.heads * self.size),
        }
        passes: dict[AttentionWindow, AttendArguments] = {}
        for layer_window, numbers in zip(self.distinct_windows, seen, strict=True):
            names = ("low", "stop", "trunk", "bits", "own")
            parts = {
                n: part.data_ptr() for n, part in zip(names, numbers.split(rows), strict=False)
            }
            passes[layer_window] = AttendArguments(**common, **parts)
        loaded, wanted = load_library(), (rows, self.heads, self.size)
        assert loaded is not None

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            if q.shape != wanted or q.dtype != self.dtype or not q.is_cpu:
                raise ValueError(f"q must be {wanted} of {self.dtype}, got {describe_tensor(q)}")
            if k.shape[1]:
                write_rows(keys, batch.write_slots, k)
                write_rows(values, batch.write_slots, v)
            # The loop reads rows at any distance, but the numbers of a row one after another.
            q = q if q.stride(-1) == 1 else q.contiguous()
            own, out = passes[self.attention_windows[layer]], torch.empty(q.shape, dtype=q.dtype)
            sinks = None if sinks is None else check_vector("sinks", sinks.float(), self.heads)
            own.q, own.q_row, own.q_head = q.data_ptr(), q.stride(0), q.stride(1)
            own.keys, own.values, own.out = keys.data_ptr(), values.data_ptr(), out.data_ptr()
            own.sinks = None if sinks is None else sinks.data_ptr()
            loaded.outpace_attend(addressof(own))
            return out

        return attend
