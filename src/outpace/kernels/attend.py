"""Attention over paged keys in Triton: items of work, and the merge of what was split over keys.

Shapes: T rows, H heads of which G share each of K key heads, D head size; M lanes of a tile, which
are its rows times G; N slots of a step. Keys are split as FlashDecoding does (Dao et al., 2023),
over pages (Kwon et al., 2023), with a stop of its own for each row. Logarithms are of base two, but
for `sinks [H]`, which are none or a further score of each head, as a model has it.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def look(
    top, total, acc, query, keys, values, table, low, stop, trunk, bits, own, begin, end, scale,
    slot_stride, N: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    MASKED: tl.constexpr, UPCAST: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Let all lanes look at the slots from `begin` to `end`, which all of them see or `MASKED`."""
    dims = tl.arange(0, WIDTH)
    for start in range(begin, end, N):
        slots = start + tl.arange(0, N)
        whole = (dims < SIZE)[None, :]
        if MASKED:  # behind the end there may be no page
            page = tl.load(table + slots // PAGE, mask=slots < end, other=0)
            whole = whole & (slots < end)[:, None]
        else:
            page = tl.load(table + slots // PAGE)
        at = (page * PAGE + slots % PAGE)[:, None] * slot_stride + dims[None, :]
        k = tl.load(keys + at, mask=whole, other=0.0)
        v = tl.load(values + at, mask=whole, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            seen = (slots[None, :] >= low[:, None]) & (slots[None, :] < stop[:, None])
            if TREES:
                behind = slots[None, :] - trunk[:, None]
                by = tl.minimum(tl.maximum(behind, 0), 62)  # no other bit is ever set
                named = ((bits[:, None] >> by.to(tl.int64)) & 1) != 0
                seen = seen | (named & (behind == by)) | (slots[None, :] == own[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a lane may have seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        added = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        acc = acc * fade[:, None] + added
        top = new
    return top, total, acc


# What differs from pass to pass must not compile it anew: numbers of rows, places in the buffer.
@triton.jit(do_not_specialize=["tables", "bounds", "items", "rows"])
def attend(
    q, keys, values, out, sums, tops, sinks, tables, bounds, items, rows, scale, q_row, q_head,
    slot_stride, head_stride,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """An item, as `plan.Plan` describes it: the rows of a tile over some of their slots.

    The grid is items times key heads. Lanes are rows times the heads that share the key head, so
    that keys are read once for all of them. An item that is all of its tile writes `out [T, H, D]`,
    another its part: `sums f32[parts, H, D]`, and the logarithm of its weights, `tops f32[parts,
    H]`. `bounds` are first the lowest slot that each of the `rows` sees, then their stops; with
    `TREES` come trunks, bits of slots behind these, and the rows' own slots.
    """
    item, group = items + tl.program_id(0) * 8, tl.program_id(1)
    first, count = tl.load(item), tl.load(item + 1)
    table, part = tables + tl.load(item + 2), tl.load(item + 7)
    begin, clear = tl.load(item + 3).to(tl.int32), tl.load(item + 4).to(tl.int32)
    unclear, end = tl.load(item + 5).to(tl.int32), tl.load(item + 6).to(tl.int32)
    lanes, dims = tl.arange(0, M), tl.arange(0, WIDTH)
    row, head = first + lanes // GROUP, group * GROUP + lanes % GROUP
    real = lanes < count * GROUP
    whole = real[:, None] & (dims < SIZE)[None, :]
    low = tl.load(bounds + row, mask=real, other=0).to(tl.int32)
    stop = tl.load(bounds + rows + row, mask=real, other=0).to(tl.int32)
    trunk, bits, own = None, None, None
    if TREES:
        trunk = tl.load(bounds + 2 * rows + row, mask=real, other=0).to(tl.int32)
        bits = tl.load(bounds + 3 * rows + row, mask=real, other=0)
        own = tl.load(bounds + 4 * rows + row, mask=real, other=-1).to(tl.int32)
    at = row[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    query = tl.load(q + at, mask=whole, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    keys += group.to(tl.int64) * head_stride
    values += group.to(tl.int64) * head_stride
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    # In the middle nothing is masked.
    top, total, acc = look(
        top, total, acc, query, keys, values, table, low, stop, trunk, bits, own, begin,
        clear, scale, slot_stride, N, PAGE, SIZE, WIDTH, True, UPCAST, TREES,
    )  # fmt: skip
    top, total, acc = look(
        top, total, acc, query, keys, values, table, low, stop, trunk, bits, own, clear,
        unclear, scale, slot_stride, N, PAGE, SIZE, WIDTH, False, UPCAST, TREES,
    )  # fmt: skip
    top, total, acc = look(
        top, total, acc, query, keys, values, table, low, stop, trunk, bits, own, unclear,
        end, scale, slot_stride, N, PAGE, SIZE, WIDTH, True, UPCAST, TREES,
    )  # fmt: skip
    keep(
        out, sums, tops, sinks, top, total, acc, row, head, part + lanes // GROUP, real, whole,
        part < 0, tl.num_programs(1) * GROUP, SIZE, WIDTH,
    )  # fmt: skip


@triton.jit
def drained(top, total, acc, sink):
    """What a sink leaves of sums: it takes part of the weight, and has no value."""
    new = tl.maximum(top, sink * LOG2E)
    base = tl.where(new == float("-inf"), 0.0, new)
    fade = tl.exp2(top - base)
    return total * fade + tl.exp2(sink * LOG2E - base), acc * fade[:, None]


@triton.jit
def keep(
    out, sums, tops, sinks, top, total, acc, row, head, part, real, whole, alone, heads,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write what the lanes that are `real` have seen: results, or parts where it is not all."""
    dims = tl.arange(0, WIDTH)
    if sinks is not None:  # where this is not all, in the merge
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        total, acc = drained(top, total, acc, tl.where(alone, sink, float("-inf")))
    nought = total == 0.0
    acc = acc / tl.where(nought, 1.0, total)[:, None]
    if alone:
        place = (row * heads + head)[:, None] * SIZE + dims[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=whole)
    else:
        lane = part * heads + head
        weight = tl.where(nought, float("-inf"), top + tl.log2(tl.where(nought, 1.0, total)))
        tl.store(tops + lane, weight, mask=real)
        tl.store(sums + lane[:, None] * SIZE + dims[None, :], acc, mask=whole)


@triton.jit(do_not_specialize=["merges"])
def merge(
    out, sums, tops, sinks, merges, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The parts of a row and `BLOCK` of its heads, `PARTS` of them at a time.

    The grid is merges times blocks of heads. A merge has four integers: the row, its first part,
    how far the next one is, and how many there are: with none it only fills up the grid.
    """
    row = tl.load(merges + tl.program_id(0) * 4)
    first = tl.load(merges + tl.program_id(0) * 4 + 1)
    step = tl.load(merges + tl.program_id(0) * 4 + 2)
    count = tl.load(merges + tl.program_id(0) * 4 + 3).to(tl.int32)
    known = tl.where(count > 0, HEADS, 0)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, WIDTH)
    whole = (heads < known)[:, None] & (dims < SIZE)[None, :]
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    for begin in range(0, count, PARTS):
        parts = begin + tl.arange(0, PARTS)
        at = (first + parts * step)[:, None] * HEADS + heads[None, :]
        here = (parts < count)[:, None] & (heads < HEADS)[None, :]
        logs = tl.load(tops + at, mask=here, other=float("-inf"))
        new = tl.maximum(top, tl.max(logs, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights, fade = tl.exp2(logs - base[None, :]), tl.exp2(top - base)
        some = tl.load(
            sums + at[:, :, None] * SIZE + dims[None, None, :],
            mask=here[:, :, None] & (dims < SIZE)[None, None, :],
            other=0.0,
        )
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * some, 0)
        total = total * fade + tl.sum(weights, 0)
        top = new
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=heads < known, other=0.0).to(tl.float32)
        total, acc = drained(top, total, acc, sink)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (row * HEADS + heads)[:, None] * SIZE + dims[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=whole)
