"""Calls of the compiled loops, for `emulated.c`: inputs, and the outputs of this machine."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_void_p, sizeof
from dataclasses import dataclass, field
from itertools import product as combinations

import numpy as np
import torch
from torch import Tensor

from delta_layers import Layer, random_layer, run_layer
from outpace.attention import compiled as attention
from outpace.attention.batch import RowSpan
from outpace.attention.compiled import AttendArguments, CompiledAttention
from outpace.attention.dense import DenseAttention
from outpace.kernels import tiles
from outpace.kernels.gated_delta import (
    DeltaState,
    RecurArguments,
    SequenceArguments,
    SequencePlan,
    SequenceRows,
    plan_sequences,
)
from outpace.kernels.loader import Isa, has_isa, load_library
from outpace.kernels.packed import (
    BLOCK_FORMATS,
    INPUT_MULTIPLES,
    INT4_BYTES,
    PackedPart,
    bind_packed_product,
    round_to_int4,
    unpack_rows,
)
from outpace.models.config import AttentionWindow
from packing import pack_blocks, random_blocks
from spans import FAR, TREE, attend, random, spans_of, stored

NUMBER, ARRAY, OUTPUT = range(3)
MULTIPLY, PACK, UNPACK, MULTIPLY_PACKED, ROUND_INT4, ATTEND, RECUR = range(1, 8)
"""Functions by their number in `emulated.c`."""

WINDOWS = [AttentionWindow(), AttentionWindow(window=3, causal=True)]
ASKED = [(60, 1, "causal"), (9, 16, "full"), (68, 10, TREE), (83, 3, FAR), (130, 3, "causal")]


def numbers(*each: int) -> bytes:
    return struct.pack(f"{len(each)}q", *each)


@dataclass(frozen=True)
class Memory:
    """Bytes of an argument, with the arrays that pointers in it point to, by place."""

    content: bytes
    pointers: dict[int, Memory | Output] = field(default_factory=dict)

    def encode(self) -> bytes:
        pointers = [numbers(place) + other.encode() for place, other in self.pointers.items()]
        head = numbers(ARRAY, len(self.content)) + self.content
        return head + numbers(len(pointers)) + b"".join(pointers)


@dataclass(frozen=True)
class Output:
    """Memory that a function fills; `expected` is what the function writes on this machine."""

    expected: Tensor

    def encode(self) -> bytes:
        return numbers(OUTPUT, self.expected.nbytes)


Argument = int | None | Tensor | Memory | Output


def content(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def encode(argument: Argument) -> bytes:
    """Return an argument as the program reads it; None is a null pointer."""
    if argument is None or isinstance(argument, int):
        return numbers(NUMBER, argument or 0)
    return (Memory(content(argument)) if isinstance(argument, Tensor) else argument).encode()


@dataclass(frozen=True)
class Call:
    """A call with its expected outputs, in the order in which the program reads them."""

    function: int
    arguments: Sequence[Argument]
    outputs: Sequence[Tensor]

    def encode(self) -> bytes:
        head = numbers(self.function, len(self.arguments))
        return head + b"".join(map(encode, self.arguments))


def tile_calls(isa: Isa) -> Iterator[Call]:
    """Products of all kinds, sizes and numbers of rows; int8 also with rows that are not finite."""
    for dtype, here in tiles.TILE_LOOPS.items():
        (there,) = (loop for loop in here if loop.isa is isa)
        like = next(loop for loop in here if loop.kind == there.kind and has_isa(loop.isa))
        tiles.find_loop = lambda _, like=like: like  # type: ignore[assignment]
        for (outputs, inputs), rows in combinations(
            ((16, 4), (80, 24), (48, 1100)), (1, 2, 3, 4, 7)
        ):
            x = random(rows, inputs, seed=1) * random(rows, inputs).exp2()
            if rows == 7 and dtype == torch.int8:
                x[1, -1], x[3, 0], x[5] = torch.inf, torch.nan, 0
            weight, bias = 16 * random(outputs, inputs), random(outputs) if rows % 2 else None
            scale = random(outputs, seed=2) if dtype == torch.int8 else None
            laid, x = tiles.to_tiles(weight.to(dtype)), x if scale is not None else x.to(dtype)
            found = tiles.bind_tile_product(laid, bias, scale)(x)
            given = (there.kind, isa, x, rows, laid.shape[1], laid, outputs, scale, bias)
            yield Call(MULTIPLY, (*given, Output(found), 1), [found])


def packed_calls(isa: Isa) -> Iterator[Call]:
    """Packing, unpacking and products in each block format."""
    loaded = load_library()
    assert loaded is not None
    for name, kind in BLOCK_FORMATS.items():
        inputs, outputs = 2 * INPUT_MULTIPLES[kind], 40
        blocks = random_blocks(name, outputs, inputs)
        matrix = pack_blocks(name, blocks)
        rows = Memory(
            bytes(8 * outputs), {8 * n: Memory(b.tobytes()) for n, b in enumerate(blocks)}
        )
        own = matrix.tiles[: loaded.outpace_packed_bytes(kind, outputs, inputs)]
        yield Call(PACK, (kind, rows, outputs, inputs, Output(own), 1), [own])
        order = torch.tensor([39, 0, 17])
        plain = unpack_rows(matrix, order)
        yield Call(UNPACK, (kind, matrix.tiles, inputs, order, 3, Output(plain), 1), [plain])
        part = Memory(bytes(PackedPart(0, outputs, kind)), {0: Memory(content(matrix.tiles))})
        for count in (1, 2, 3, 7, 10, 17):
            x, bias = random(count, inputs, seed=count), random(outputs) if count % 2 else None
            x[-1, :32] = 127.0 if count == 7 else x[-1, :32]
            found = bind_packed_product(matrix, bias)(x)
            given = (isa, part, 1, x, count, inputs, outputs, bias)
            yield Call(MULTIPLY_PACKED, (*given, Output(found), 1), [found])


def rounding_calls() -> Iterator[Call]:
    plain = random(9, 96)
    plain[0], plain[1] = 0, plain[1].abs()
    blocks = round_to_int4(plain)
    assert blocks.shape[-1] == INT4_BYTES
    yield Call(ROUND_INT4, (plain, plain.numel() // 32, Output(blocks), 1), [blocks])


def attention_calls(isa: Isa) -> Iterator[Call]:
    """Attention of all dtypes, with trees, windows and sinks, over scattered pages."""
    dtypes = torch.float32, torch.bfloat16
    for (heads, kv_heads, size), dtype, cached, has_sinks in combinations(
        *(((4, 2, 16), (2, 1, 80), (9, 1, 48)), dtypes),
        *((*dtypes, torch.float16, torch.int8), (False, True)),
    ):
        spans = spans_of(ASKED, 140)
        memory = random(2, len(ASKED) * 144, kv_heads, size)
        q = random(spans[-1].rows.stop, heads, size, seed=1).to(dtype)
        layers = ([stored(each, cached).contiguous()] * len(WINDOWS) for each in memory)
        backend = CompiledAttention(DenseAttention(*layers, heads, WINDOWS, dtype=dtype))
        sinks = random(heads, seed=4) if has_sinks else None
        for layer in range(len(WINDOWS)):
            yield record_attention(isa, backend, spans, q, layer, sinks)


def record_attention(
    isa: Isa,
    backend: CompiledAttention,
    spans: list[RowSpan],
    q: Tensor,
    layer: int,
    sinks: Tensor | None,
) -> Call:
    """Attend on this machine, and return the same call for another."""
    taken: list[AttendArguments] = []
    loaded = attention.load_library()
    assert loaded is not None

    class Recorder:
        def outpace_attend(self, address: int) -> None:
            taken.append(AttendArguments.from_buffer_copy(AttendArguments.from_address(address)))
            loaded.outpace_attend(address)

    attention.load_library = Recorder  # type: ignore[assignment]
    try:
        found = attend(backend, spans, q, layer, sinks)
    finally:
        attention.load_library = lambda: loaded  # type: ignore[assignment]
    (own,) = taken
    own.isa = isa
    pages, tables, chunks, *seen = map(torch.from_numpy, backend.plan_arrays(spans))
    bounds = seen[backend.distinct_windows.index(backend.attention_windows[layer])]
    parts = bounds.split(len(q))
    arrays = {
        "q": q,
        "keys": backend.keys[layer],
        "values": backend.values[layer],
        "sinks": sinks,
        "pages": pages,
        "tables": tables,
        "chunks": chunks,
        **dict(zip(("low", "stop", "trunk", "bits", "own"), parts, strict=False)),
    }
    pointers: dict[int, Memory | Output] = {}
    for name, kind in AttendArguments._fields_:
        place = getattr(AttendArguments, name).offset
        if name == "out":
            pointers[place] = Output(found)
        elif kind is c_void_p and (array := arrays.get(name)) is not None:
            pointers[place] = Memory(content(array))
    assert sizeof(AttendArguments) == len(bytes(own))
    return Call(ATTEND, (Memory(bytes(own), pointers),), [found])


def recurrent_calls(isa: Isa) -> Iterator[Call]:
    """Prompts, rows after kept ones and single rows of gated delta layers, in one pass."""
    for sizes in ((2, 4, 16, 48), (1, 1, 32, 16, 2), (2, 2, 48, 32)):
        layer = random_layer(*sizes)
        _, (early, late) = run_layer(layer, [(None, 0, 5), (None, 0, 20)], 12)
        parts = [(None, 0, 19), (early.states[-1], 5, 11), (late.states[-1], 20, 21)]
        for settled, copied in ((0, ()), (10, (9,)), (20, ())):
            yield record_recurrence(isa, layer, parts[: 2 if copied else 3], settled, copied)


def record_recurrence(
    isa: Isa,
    layer: Layer,
    parts: Sequence[tuple[DeltaState | None, int, int]],
    settled: int,
    copied: Sequence[int],
) -> Call:
    """Run rows on this machine, and return the same call for another."""
    out, states = run_layer(layer, parts, settled, copied)
    slots = [slot for _, begin, end in parts for slot in range(begin, end)]
    sequences, first = [], 0
    for state, begin, end in parts:
        sequences.append(SequenceRows(state, slice(first, first + end - begin), settled, copied))
        first += end - begin
    mixed, weight = layer.mixed[slots], layer.weight
    plans = plan_sequences(mixed, sequences, layer.shape, layer.taps)
    outputs = [torch.cat(out)]
    table = b""
    pointers: dict[int, Memory | Output] = {}
    for number, (plan, found) in enumerate(zip(plans, states, strict=True)):
        table += bytes(plan.arguments)
        copies = {copy.start: copy.state for copy in found.copies}
        written = sequence_pointers(plan, found.states[-1], copies)
        outputs += [each.expected for each in nested_outputs(written)]
        start = number * sizeof(SequenceArguments)
        pointers |= {start + place: memory for place, memory in written.items()}
    heads, key, value = layer.shape
    numbers_of = (layer.key_heads, heads, key, value, layer.taps)
    own = RecurArguments(isa, 1, *numbers_of)
    own.stride, own.num_sequences = mixed.stride(0), len(plans)
    scratch = bytes(4 * len(slots) * (mixed.shape[1] + layer.key_heads))
    arrays: dict[str, Memory | Output] = {
        "inputs": Memory(content(mixed)),
        "weight": Memory(content(weight)),
        "decays": Memory(content(layer.decay[slots])),
        "weights": Memory(content(layer.beta[slots])),
        "mixed": Memory(scratch),
        "out": Output(outputs[0]),
        "sequences": Memory(table, pointers),
    }
    places = {getattr(RecurArguments, name).offset: array for name, array in arrays.items()}
    return Call(RECUR, (Memory(bytes(own), places),), outputs)


def sequence_pointers(
    plan: SequencePlan, after: DeltaState, copies: Mapping[int, Tensor]
) -> dict[int, Memory | Output]:
    """Return what the pointers of a sequence point to, by place; outputs are what it has after."""
    before = plan.first
    marked = {**copies, after.start: after.state}
    marks = b"".join(numbers(slot - before.start, 0) for slot in plan.marked)
    outputs: dict[int, Memory | Output] = {
        16 * number + 8: Output(marked[slot]) for number, slot in enumerate(plan.marked)
    }
    arrays: dict[str, Memory | Output] = {
        "state": Memory(content(before.state)),
        "inputs": Memory(content(before.inputs)),
        "keys": Memory(content(before.keys)),
        "values": Memory(content(before.values)),
        "decays": Memory(content(before.decay)),
        "marks": Memory(marks, outputs),
        "next_inputs": Output(after.inputs),
        "next_keys": Output(after.keys),
        "next_values": Output(after.values),
        "next_decays": Output(after.decay),
    }
    return {getattr(SequenceArguments, name).offset: array for name, array in arrays.items()}


def nested_outputs(pointers: Mapping[int, Memory | Output]) -> Iterator[Output]:
    """Return the outputs in the order in which the program reads them."""
    for memory in pointers.values():
        if isinstance(memory, Output):
            yield memory
        else:
            yield from nested_outputs(memory.pointers)


def differing(calls: Sequence[Call], written: bytes) -> list[str]:
    """Return which calls wrote other numbers than on this machine; NaN equals NaN."""
    wrong, at = [], 0
    for call in calls:
        for output in filter(Tensor.numel, call.outputs):
            own = np.frombuffer(written, np.uint8, output.nbytes, at).copy()
            found = torch.from_numpy(own).view(output.dtype).view(output.shape)
            at += output.nbytes
            same = found.eq(output) | (found.ne(found) & output.ne(output))
            if not bool(same.all()):
                wrong.append(f"function {call.function}: {output.dtype} {list(output.shape)}")
    assert at == len(written)
    return wrong
