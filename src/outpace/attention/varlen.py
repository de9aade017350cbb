"""Attention over cached slots by PyTorch's `varlen_attn`, in at most two calls per layer.

A call takes sequences of rows, each over a page table: either all are causal, or all rows see what
is below the stop of their sequence. So blocks become several sequences over one page table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.attention.batch import Batch, Span
from outpace.attention.dense import Dense
from outpace.attention.plan import Numbers, pages_of, tells, unknown
from outpace.models.config import Sight
from outpace.models.transformer import Attend

Window = tuple[int, int]
"""Slots that a row sees before and behind its own, -1 for all; the last row is at the last key."""

Call = Callable[..., Any]
"""`varlen_attn`, or what stands in for it."""


def missing(device: torch.device) -> str | None:
    """What a device or PyTorch lacks to attend over pages of 16 slots; None if nothing."""
    if device.type != "cuda":
        return f"it runs on a GPU, not on {device.type}"
    if found() is None:
        return f"PyTorch {torch.__version__} has no varlen_attn over pages, which comes with 2.12"
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        return "FlashAttention 3 needs compute capability 9.0, not {}.{}".format(*capability)
    if find_spec("flash_attn_interface") is None:
        return "flash_attn_interface (FlashAttention 3) is missing, and 2 needs pages of 256 slots"
    return None


def found() -> Call | None:
    """This PyTorch's `varlen_attn`, if it takes page tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    pages = {"seqused_k", "block_table"} <= set(signature(varlen_attn).parameters)
    return varlen_attn if pages else None


def unfit(keys: Tensor, sights: Sequence[Sight], sinks: bool) -> str | None:
    """Why it cannot attend over a cache of `keys [S, K, D]`; None where it can."""
    if keys.dtype not in (torch.float16, torch.bfloat16):
        return f"it knows float16 and bfloat16, not {keys.dtype}"
    if (size := keys.shape[-1]) % 8 or size > 256:
        return f"heads of {size} are no multiple of 8 up to 256"
    if news := unknown(Sight, sights, {"window", "causal"}):
        return f"it does not know the {news} of a layer's sight"
    return "layers have sinks" if sinks else None


class Part(NamedTuple):
    """Rows that are one sequence of a call; what the last of them sees is below `stop`."""

    span: Span
    rows: range
    stop: int


def parts(spans: Sequence[Span], sight: Sight) -> dict[Window, list[Part]]:
    """What each call attends with, by its window."""
    calls: dict[Window, list[Part]] = {}
    for span in spans:
        rows = range(span.rows.start, span.rows.stop)
        if span.stops is None or sight.causal:
            window = (-1 if sight.window is None else sight.window - 1, 0)
            calls.setdefault(window, []).append(Part(span, rows, span.start + len(rows)))
            continue
        ends = [0, *(np.flatnonzero(np.diff(span.stops)) + 1).tolist(), len(rows)]
        blocks = [Part(span, rows[a:b], span.stops[a]) for a, b in pairwise(ends)]
        calls.setdefault((-1, -1), []).extend(blocks)
    return calls


class Varlen:
    """Plans the calls of a pass as numbers on the device, and makes them layer by layer.

    `dense` has the cache, and attends where a forward says what a `call` cannot.
    """

    def __init__(self, dense: Dense, call: Call, *, page: int) -> None:
        self.dense, self.call, self.page = dense, call, page
        self.keys, self.values, self.sights = dense.keys, dense.values, dense.sights
        self.kinds = list(dict.fromkeys(self.sights))
        self.told: set[str] = set()

    def numbers(self, spans: Sequence[Span]) -> list[Numbers]:
        """Of each call of each kind of layer; nothing where `dense` attends, which the log says."""
        news = unknown(Span, spans, {"rows", "start", "seen", "stops", "pages"})
        slides = any(sight.window is not None and not sight.causal for sight in self.kinds)
        if slides and any(span.stops is not None for span in spans):
            news = news or "stops in layers that slide"
        if tells(news, self.told):
            return []
        calls = (own for sight in self.kinds for own in parts(spans, sight).values())
        return [laid_out(own, self.page) for own in calls]

    def plan(self, batch: Batch) -> Attend:
        """What is the same in every layer is done here, once per pass."""
        if not batch.numbers:
            return self.dense.plan(batch)
        numbers = iter(batch.numbers)
        calls = {
            sight: [
                self.planned(window, own, next(numbers))
                for window, own in parts(batch.spans, sight).items()
            ]
            for sight in self.kinds
        }

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
        ) -> Tensor:
            assert sinks is None
            keys, values = self.keys[layer], self.values[layer]
            keys.index_copy_(0, batch.write, k)
            values.index_copy_(0, batch.write, v)
            memory = [each.unflatten(0, (-1, self.page)) for each in (keys, values)]
            own = calls[self.sights[layer]]
            if len(own) == 1:
                whole: Tensor = own[0][1](q, *memory)
                return whole
            out = q.new_empty(q.shape)
            for rows, call in own:
                out[rows] = call(q[rows], *memory)
            return out

        return attend

    def planned(self, window: Window, own: Sequence[Part], numbers: Tensor) -> tuple[Tensor, Call]:
        """The rows of a call, and what attends with them."""
        count, lengths = len(own), [len(part.rows) for part in own]
        rows, rest = numbers.tensor_split([sum(lengths)])
        begins, stops, tables = rest.int().tensor_split([count + 1, 2 * count + 1])
        return rows, partial(
            self.call,
            cu_seq_q=begins,
            cu_seq_k=None,
            max_q=max(lengths),
            max_k=max(part.stop for part in own),
            window_size=window,
            enable_gqa=self.dense.sharing > 1,
            seqused_k=stops,
            block_table=tables.view(count, -1),
        )


def laid_out(own: Sequence[Part], page: int) -> Numbers:
    """Rows, where sequences begin among them and end, stops, page tables `[sequences, pages]`."""
    rows = [np.array(part.rows) for part in own]
    pages = [pages_of(part.span, page) for part in own]
    tables = np.zeros((len(own), max(map(len, pages))), dtype=np.int64)
    for table, each in zip(tables, pages, strict=True):
        table[: len(each)] = each
    begins = np.cumsum([0, *map(len, rows)])
    return np.concatenate([*rows, begins, [part.stop for part in own], tables.ravel()])
