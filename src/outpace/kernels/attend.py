"""Attention over paged keys in Triton: work items, and the merge of items split over keys.

Shapes: T rows; H heads, of which G share each of K key heads; head size D; M lanes of a tile, its
rows times G; N slots of a step. Keys are split as in FlashDecoding (Dao et al., 2023), over pages
(Kwon et al., 2023), and each row has a separate visible range. Logarithms are of base two, except
`sinks [H]`: an additional natural-log score per head, or None.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))

FIRST_ROW, NUM_ROWS, TABLE, BEGIN, FULL_BEGIN, FULL_END, END, PART = map(tl.constexpr, range(8))
ITEM_COLUMNS = tl.constexpr(8)
"""Columns of the work items, `WorkItems` in `attention/paged.py`."""

ROW, FIRST_PART, STRIDE, NUM_PARTS = map(tl.constexpr, range(4))
MERGE_COLUMNS = tl.constexpr(4)
"""Columns of the merges, `RowMerges` in `attention/paged.py`."""


@triton.jit
def load_rows(cached, at, whole, SIZE: tl.constexpr):
    """Load the rows of a head that begin at offsets `at`, without those outside `whole`.

    After the numbers of an int8 row comes the float32 that they are times.
    """
    dims = tl.arange(0, whole.shape[1])
    rows = tl.load(cached + at[:, None] + dims[None, :], mask=whole, other=0)
    if cached.dtype.element_ty == tl.int8:
        place = (cached + at + SIZE).to(tl.pointer_type(tl.float32))
        scale = tl.load(place, mask=tl.max(whole.to(tl.int32), 1) > 0, other=0.0)
        rows = rows.to(tl.float32) * scale[:, None]
    return rows


@triton.jit
def accumulate_slots(
    sums, query, cache, bounds, begin, end, scale, N: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Accumulate the slots `begin` to `end` for all lanes; `MASKED` unless all lanes see them.

    `sums` are the largest score of each lane, its total weight, and its sum of weighted values;
    `cache` has keys, values, page table and stride of slots; `bounds` are those of `attend`.
    """
    top, total, acc = sums
    keys, values, table, slot_stride = cache
    low, visible_end, root_slot, ancestors, own_slot = bounds
    dims = tl.arange(0, WIDTH)
    for start in range(begin, end, N):
        slots = start + tl.arange(0, N)
        whole = (dims < SIZE)[None, :]
        if MASKED:  # past the end there may be no page
            page = tl.load(table + slots // PAGE, mask=slots < end, other=0)
            whole = whole & (slots < end)[:, None]
        else:
            page = tl.load(table + slots // PAGE)
        at = (page * PAGE + slots % PAGE) * slot_stride
        k = load_rows(keys, at, whole, SIZE).to(query.dtype)
        v = load_rows(values, at, whole, SIZE).to(query.dtype)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            visible = (slots[None, :] >= low[:, None]) & (slots[None, :] < visible_end[:, None])
            if TREES:
                offset = slots[None, :] - root_slot[:, None]
                bit = tl.minimum(tl.maximum(offset, 0), 62)  # higher bits are never set
                is_ancestor = ((ancestors[:, None] >> bit.to(tl.int64)) & 1) != 0
                visible = (
                    visible
                    | (is_ancestor & (offset == bit))
                    | (slots[None, :] == own_slot[:, None])
                )
            scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a lane may not have seen a slot yet
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        added = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        acc = acc * fade[:, None] + added
        top = new
    return top, total, acc


# Row counts and buffer offsets change with every pass and must not trigger a recompilation.
@triton.jit(do_not_specialize=["tables", "bounds", "items", "rows"])
def attend(
    q, keys, values, out, sums, tops, sinks, tables, bounds, items, rows, scale, q_row, q_head,
    slot_stride, head_stride,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr, TREES: tl.constexpr,
):  # fmt: skip
    """Compute a work item: some rows of a sequence over some of their slots.

    The grid is items times key heads. Lanes are rows times the heads that share the key head, so
    keys are read once for all of them. An item that covers all slots of its rows writes `out [T, H,
    D]`. Any other writes a part: `sums f32[parts, H, D]`, and the logarithm of its total weight,
    `tops f32[parts, H]`. `bounds` has the lowest visible slot of each of the `rows`, then the ends
    of their visible ranges; with `TREES` also root slots, ancestor masks, and the rows' own slots.
    """
    item, group = items + tl.program_id(0) * ITEM_COLUMNS, tl.program_id(1)
    first, count = tl.load(item + FIRST_ROW), tl.load(item + NUM_ROWS)
    table, part = tables + tl.load(item + TABLE), tl.load(item + PART)
    begin, end = tl.load(item + BEGIN).to(tl.int32), tl.load(item + END).to(tl.int32)
    full_begin = tl.load(item + FULL_BEGIN).to(tl.int32)
    full_end = tl.load(item + FULL_END).to(tl.int32)
    lanes, dims = tl.arange(0, M), tl.arange(0, WIDTH)
    row, head = first + lanes // GROUP, group * GROUP + lanes % GROUP
    real = lanes < count * GROUP
    whole = real[:, None] & (dims < SIZE)[None, :]
    low = tl.load(bounds + row, mask=real, other=0).to(tl.int32)
    visible_end = tl.load(bounds + rows + row, mask=real, other=0).to(tl.int32)
    root_slot, ancestors, own_slot = None, None, None
    if TREES:
        root_slot = tl.load(bounds + 2 * rows + row, mask=real, other=0).to(tl.int32)
        ancestors = tl.load(bounds + 3 * rows + row, mask=real, other=0)
        own_slot = tl.load(bounds + 4 * rows + row, mask=real, other=-1).to(tl.int32)
    at = row[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    query = tl.load(q + at, mask=whole, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    keys += group.to(tl.int64) * head_stride
    values += group.to(tl.int64) * head_stride
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    sums_of_lanes = (top, total, acc)
    cache = (keys, values, table, slot_stride)
    seen = (low, visible_end, root_slot, ancestors, own_slot)
    # Only the first and last slots need a mask.
    sums_of_lanes = accumulate_slots(
        sums_of_lanes, query, cache, seen, begin, full_begin, scale, N, PAGE, SIZE, WIDTH,
        MASKED=True, TREES=TREES,
    )  # fmt: skip
    sums_of_lanes = accumulate_slots(
        sums_of_lanes, query, cache, seen, full_begin, full_end, scale, N, PAGE, SIZE, WIDTH,
        MASKED=False, TREES=TREES,
    )  # fmt: skip
    sums_of_lanes = accumulate_slots(
        sums_of_lanes, query, cache, seen, full_end, end, scale, N, PAGE, SIZE, WIDTH,
        MASKED=True, TREES=TREES,
    )  # fmt: skip
    store_result(
        out, sums, tops, sinks, sums_of_lanes, row, head, part + lanes // GROUP, real, whole,
        alone=part < 0, heads=tl.num_programs(1) * GROUP, SIZE=SIZE, WIDTH=WIDTH,
    )  # fmt: skip


@triton.jit
def apply_sink(top, total, acc, sink):
    """Apply a sink to the sums: it adds weight without a value."""
    new = tl.maximum(top, sink * LOG2E)
    base = tl.where(new == float("-inf"), 0.0, new)
    fade = tl.exp2(top - base)
    return total * fade + tl.exp2(sink * LOG2E - base), acc * fade[:, None]


@triton.jit
def store_result(
    out, sums, tops, sinks, sums_of_lanes, row, head, part, real, whole, alone, heads,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the results of the `real` lanes, or their partial sums unless `alone`."""
    top, total, acc = sums_of_lanes
    dims = tl.arange(0, WIDTH)
    if sinks is not None:  # for partial sums, the merge applies it
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        total, acc = apply_sink(top, total, acc, tl.where(alone, sink, float("-inf")))
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    if alone:
        place = (row * heads + head)[:, None] * SIZE + dims[None, :]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=whole)
    else:
        lane = part * heads + head
        weight = tl.where(is_empty, float("-inf"), top + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(tops + lane, weight, mask=real)
        tl.store(sums + lane[:, None] * SIZE + dims[None, :], acc, mask=whole)


@triton.jit(do_not_specialize=["merges"])
def merge(
    out, sums, tops, sinks, merges, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a row for `BLOCK` of its heads, `PARTS` parts at a time.

    The grid is merges times blocks of heads. A merge without parts is padding of the grid.
    """
    own = merges + tl.program_id(0) * MERGE_COLUMNS
    row, first = tl.load(own + ROW), tl.load(own + FIRST_PART)
    step, count = tl.load(own + STRIDE), tl.load(own + NUM_PARTS).to(tl.int32)
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
        total, acc = apply_sink(top, total, acc, sink)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (row * HEADS + heads)[:, None] * SIZE + dims[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=whole)
