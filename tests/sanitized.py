"""Runs all compiled loops, built with sanitizers, over all that they are allowed to be given.

Its argument is the library. A fault ends the process with a report; what comes out is compared with
PyTorch in double precision. The last line is how many products, passes and recurrences were run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product as combinations
from types import SimpleNamespace

import torch

from delta_layers import by_definition, random_layer, run_layer
from outpace.attention import compiled as attention
from outpace.attention.compiled import CompiledAttention
from outpace.attention.dense import DenseAttention
from outpace.decoding.tree import Tree
from outpace.kernels import compiled_delta, int4, loader, packed, tiles
from outpace.kernels.matmul import quantize_rows
from outpace.models.config import AttentionWindow
from packing import dequantized, multiplied, pack_blocks, random_blocks
from spans import FAR, TREE, attend, random, spans_of

LAYERS = ((2, 4, 16, 48), (1, 1, 32, 16, 2), (2, 2, 256, 32), (1, 3, 16, 16, 8))
FORWARDS = [(0, 5, 4, []), (3, 4, 3, []), (4, 9, 4, []), (7, 8, 7, []), (8, 40, 32, [16, 32])]
FORWARDS += [(38, 39, 38, []), (39, 58, 30, []), (55, 60, 55, []), (59, 60, 59, [])]
ROWS = (0, *range(1, 19), 32, 33, 127, 128, 129, 257)
SIZES = ((16, 4), (16, 8), (48, 20), (80, 512), (112, 1032), (16, 4100))
MIXED = [
    (60, 1, "causal"),
    (9, 16, "full"),
    (0, 5, (2, 3)),
    (3, 4, 40),
    (68, 10, TREE),
    (83, 3, FAR),
    (0, 33, "causal"),
    (130, 3, "causal"),
]
DEEP = [(20, 64, Tree(20, tuple(2 ** min(row, 63) - 1 for row in range(64)))), (0, 1, "causal")]
SIGHTS = [
    AttentionWindow(),
    AttentionWindow(window=1),
    AttentionWindow(window=3, causal=True),
    AttentionWindow(window=1000, causal=False),
]


def products() -> Iterator[None]:
    """Each loop with every size, number of rows and threads, with a bias and without."""
    loops = [(dtype, loop) for dtype, each in tiles.TILE_LOOPS.items() for loop in each]
    for dtype, loop in loops:
        if not loader.has_isa(loop.isa):
            continue
        tiles.find_loop = lambda _, loop=loop: loop  # type: ignore[assignment]
        for (outputs, inputs), rows in combinations(SIZES, ROWS):
            one(dtype, outputs, inputs, rows)
            yield
        if dtype == torch.int8:
            one(dtype, 16, tiles.MAX_INT8_INPUTS // 4 * 4, 2)
            odd_rows()
            yield


def one(dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> None:
    """Multiply, with threads and bias as the numbers of rows go."""
    weight, x = 16 * random(outputs, inputs), random(rows, inputs, seed=1)
    bias = random(outputs, seed=2) if rows % 2 else None
    tiles.THREAD_WORK = 1
    torch.set_num_threads(1 + rows % 3)
    laid = tiles.to_tiles(weight.to(dtype))
    assert torch.equal(tiles.from_tiles(laid), weight.to(dtype))
    if dtype == torch.int8:
        codes, scale = quantize_rows(x)
        found = tiles.bind_tile_product(laid, bias, torch.ones(outputs))(x).double()
        exact = (codes.double() - 128) @ weight.to(dtype).double().T * scale
    else:
        found = tiles.bind_tile_product(laid, bias)(x.to(dtype)).double()
        exact = x.to(dtype).double() @ weight.to(dtype).double().T
    exact = exact if bias is None else exact + bias
    within = 2**-7 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, exact, rtol=within, atol=1e-2)


def odd_rows() -> None:
    """Rows whose numbers are none, or as large or small as float32 has them."""
    laid, scale = tiles.to_tiles(torch.full((16, 12), -128, dtype=torch.int8)), torch.ones(16)
    largest = torch.finfo(torch.float32).max
    for value in (torch.inf, -torch.inf, torch.nan, -torch.nan, largest, -largest, 1e-45, 0.0):
        for count in (1, 2, 12):
            x = torch.zeros(3, 12)
            x[1, -count:] = value
            found = tiles.bind_tile_product(laid, None, scale)(x)
            assert found[1].isnan().all() == (not abs(value) < torch.inf)
            assert not found[[0, 2]].any()


def packed_products() -> Iterator[None]:
    """Each loop with every block format and number of rows; outputs that do not fill a tile too."""
    for name, kind in packed.BLOCK_FORMATS.items():
        inputs = 2 * packed.INPUT_MULTIPLES[kind]
        for outputs in (1, 16, 40):
            blocks = random_blocks(name, outputs, inputs)
            matrix = pack_blocks(name, blocks)
            found = packed.unpack_rows(matrix, torch.arange(outputs))
            assert torch.equal(found, torch.from_numpy(dequantized(name, blocks)))
            x = random(max(ROWS), inputs, seed=1)
            wanted = torch.from_numpy(multiplied(name, blocks, x.numpy()))
            present = filter(loader.has_isa, packed.PACKED_LOOPS)
            for loop, rows in combinations(present, ROWS):
                packed.thread_count = lambda work, rows=rows: 1 + rows % 3  # type: ignore
                product = packed.bind_packed_product(matrix, loop=loop)
                assert torch.equal(product(x[:rows].clone()), wanted[:rows])
                yield
    for outputs, inputs in ((1, 32), (3, 96), (16, 64), (5, 416)):
        plain = random(outputs, inputs)
        plain[0, :32] = 0
        for value in (1.0, 1e-30, 1e30, torch.inf):
            for name in int4.BLOCK_BYTES:
                int4.thread_count = lambda work, outputs=outputs: 1 + outputs % 3  # type: ignore
                int4.quantize_blocks(plain * value, name)
        rounded = int4.pack_blocks([int4.quantize_blocks(plain, "INT4")], "INT4")
        assert rounded is not None
        assert (packed.dequantize_packed(rounded) - plain).norm() <= 0.1 * plain.norm()
        yield


def passes() -> Iterator[None]:
    """All passes with each loop."""
    for loop in filter(loader.has_isa, attention.ATTENTION_LOOPS):
        attention.find_attention_loop = lambda loop=loop: loop  # type: ignore[assignment]
        yield from passes_of_loop()


def passes_of_loop() -> Iterator[None]:
    """All sizes of heads, ways to share them, patterns, sights, sinks, dtypes and threads."""
    shapes = [*((2, 1, size) for size in range(16, 257, 16)), (20, 1, 64), (14, 2, 64), (6, 6, 32)]
    for number, (shape, dtype, asked) in enumerate(
        combinations(shapes, (torch.float32, torch.bfloat16), (MIXED, MIXED[::-1], DEEP))
    ):
        for sinks in (None, random(shape[0], seed=4).to(dtype)):
            attention.thread_count = lambda work, number=number: 1 + number % 4  # type: ignore
            look(shape, dtype, asked, sinks)
            yield
    for rows, start in combinations((1, 2, 15, 16, 17, 31, 33), (0, 1, 15, 16, 300)):
        look((4, 2, 32), torch.float32, [(start, rows, "causal")], None)
        yield


def look(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    asked: list[tuple[int, int, object]],
    sinks: torch.Tensor | None,
) -> None:
    """Attend in a layer of each sight; pages are scattered, and the last one ends the memory."""
    heads, kv_heads, size = shape
    most = max(start + rows for start, rows, _ in asked)
    most = max([most, *(pattern for *_, pattern in asked if isinstance(pattern, int))])
    spans = spans_of(asked, most)
    memory = random(2, len(asked) * -(-most // 16) * 16, kv_heads, size).to(dtype)
    q = random(spans[-1].rows.stop, heads, size, seed=1).to(dtype)
    layers = [memory[0].clone()] * len(SIGHTS), [memory[1].clone()] * len(SIGHTS)
    ours = CompiledAttention(DenseAttention(*layers, heads, SIGHTS))
    exact = DenseAttention(*([each.double() for each in kind] for kind in layers), heads, SIGHTS)
    for layer in range(len(SIGHTS)):
        found = attend(ours, spans, q, layer, sinks)
        own = None if sinks is None else sinks.double()
        wanted = attend(exact, spans, q.double(), layer, own)
        within = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), wanted, rtol=within, atol=within)


def recurrences() -> Iterator[None]:
    """Gated delta layers of all widths, with kept rows, copies, and up to three threads."""
    for sizes, loop in combinations(LAYERS, filter(loader.has_isa, compiled_delta.DELTA_LOOPS)):
        layer = random_layer(*sizes)
        (wanted, _), state = by_definition(layer), None
        for begin, end, settled, copied in FORWARDS:
            compiled_delta.thread_count = lambda work, end=end: 1 + end % 3  # type: ignore
            own = None if state is None else state.rewind(begin)
            parts = [(own, begin, end), (None, 0, end), (own, begin, begin + 1)]
            found, states = run_layer(layer, parts, settled, (), loop)
            torch.testing.assert_close(found[0].double(), wanted[begin:end], rtol=2e-5, atol=2e-5)
            copies = run_layer(layer, parts[:1], settled, copied, loop)[1][0].copies
            assert [copy.start for copy in copies] == copied
            state = states[0].states[-1]
            yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    loader.find_spec = lambda _: SimpleNamespace(origin=sys.argv[1])  # type: ignore[assignment]
    print(*(sum(1 for _ in each()) for each in (products, passes, packed_products, recurrences)))
