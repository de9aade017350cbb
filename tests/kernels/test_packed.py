"""Products with packed matrices, compared with the published formats and a loop in NumPy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import needs_packed_loops
from outpace.kernels.loader import Isa, has_isa
from outpace.kernels.packed import (
    BLOCK_FORMATS,
    INPUT_MULTIPLES,
    PACKED_LOOPS,
    FormatRows,
    bind_packed_product,
    dequantize_packed,
    pack_matrix,
    select_packed_rows,
    unpack_rows,
)
from packing import dequantized, multiplied, pack_blocks, random_blocks, rows_of

pytestmark = needs_packed_loops

LOOPS = [loop for loop in PACKED_LOOPS if has_isa(loop)]
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 129)
SIZES = ((16, 1), (48, 3), (80, 2), (33, 1), (1, 2), (15, 5))
"""Outputs, and times that the inputs are those of a block."""


def random_rows(count: int, inputs: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, inputs, generator=generator)
    return rows * torch.rand(count, inputs, generator=generator).exp2_().pow(4)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_packing_is_lossless(name: str, size: tuple[int, int]) -> None:
    outputs, inputs = size[0], size[1] * INPUT_MULTIPLES[BLOCK_FORMATS[name]]
    blocks = random_blocks(name, outputs, inputs)
    found = unpack_rows(pack_blocks(name, blocks), torch.arange(outputs))
    assert np.array_equal(found.numpy(), dequantized(name, blocks))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_selected_rows_have_the_bits_of_the_whole(name: str) -> None:
    inputs = 2 * INPUT_MULTIPLES[BLOCK_FORMATS[name]]
    packed, x = pack_blocks(name, random_blocks(name, 37, inputs)), random_rows(3, inputs)
    numbers = torch.tensor([36, 0, 17, 17, *range(5, 30), 16, 15, 3])
    some = select_packed_rows(packed, numbers)
    assert torch.equal(dequantize_packed(some), dequantize_packed(packed)[numbers])
    whole = bind_packed_product(packed)(x)
    assert torch.equal(bind_packed_product(some)(x), whole[:, numbers])


def test_every_float16_is_a_scale() -> None:
    every = np.arange(2**16, dtype=np.uint16).reshape(-1, 1, 1).view(np.uint8)
    blocks = np.concatenate((every, np.full((2**16, 1, 32), 1, np.uint8)), -1)
    finite = np.isfinite(every.reshape(-1, 2).copy().view(np.float16))[:, 0]
    good = np.ascontiguousarray(blocks[finite])
    packed = pack_blocks("Q8_0", good)
    assert np.array_equal(
        unpack_rows(packed, torch.arange(len(good))).numpy(), dequantized("Q8_0", good)
    )
    for bad in np.flatnonzero(~finite)[::97]:
        row = np.ascontiguousarray(blocks[bad : bad + 1])
        assert pack_matrix([rows_of("Q8_0", row)], 32) is None


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
def test_a_minimum_that_is_not_finite_is_refused(name: str) -> None:
    blocks = random_blocks(name, 1, 256)
    blocks[0, -1, 2:4] = np.array([np.inf], np.float16).view(np.uint8)
    assert pack_matrix([rows_of(name, blocks)], 256) is None


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_products_have_the_bits_of_the_plain_loop(name: str, loop: Isa) -> None:
    for number, (outputs, times) in enumerate(SIZES):
        inputs = times * INPUT_MULTIPLES[BLOCK_FORMATS[name]]
        blocks, x = random_blocks(name, outputs, inputs, number), random_rows(7, inputs, number)
        wanted = multiplied(name, blocks, x.numpy())
        bias = torch.linspace(-1, 1, outputs)
        packed = pack_blocks(name, blocks)
        for count in (0, 1, 2, 3, 4, 5, 7):
            # A copy: a sanitizer then notices reads past its end.
            found = bind_packed_product(packed, loop=loop)(x[:count].clone())
            assert np.array_equal(found.numpy(), wanted[:count])
        added = bind_packed_product(packed, bias, loop)(x)
        assert np.array_equal(added.numpy(), wanted + bias.numpy())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_the_largest_codes_do_not_overflow(name: str, loop: Isa) -> None:
    inputs = 2 * INPUT_MULTIPLES[BLOCK_FORMATS[name]]
    x = torch.cat([torch.full((1, inputs), sign) for sign in (-1.0, 1.0)])
    x = torch.cat((x, x[:1] * torch.tensor([-1.0, 1.0]).repeat(inputs // 2)))
    for bits in (0, 255, 127, 128):
        blocks = random_blocks(name, 16, inputs)
        random = blocks.copy()
        blocks[:] = bits
        for place in (0, 2, 208) if name == "Q6_K" else (0, 2):
            blocks[..., place : place + 2] = random[..., place : place + 2]
        if name in ("Q4_0", "Q5_0", "Q8_0"):
            blocks[..., 2:4] = bits
        if name == "INT4":  # the code of zero at either end, too
            blocks[..., 2:4] = bits & 15, bits
        if name == "Q6_K":
            blocks[..., :4] = bits
        found = bind_packed_product(pack_blocks(name, blocks), loop=loop)(x)
        assert np.array_equal(found.numpy(), multiplied(name, blocks, x.numpy()))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_row_is_batch_invariant(name: str, loop: Isa) -> None:
    inputs = 3 * INPUT_MULTIPLES[BLOCK_FORMATS[name]]
    product = bind_packed_product(pack_blocks(name, random_blocks(name, 80, inputs)), loop=loop)
    x, threads = random_rows(256, inputs), torch.get_num_threads()
    whole = product(x)
    try:
        for number, count in enumerate(COUNTS):
            torch.set_num_threads(1 + number % 4)
            assert torch.equal(product(x[:count]), whole[:count])
            assert torch.equal(product(x[-count:]), whole[-count:])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("loop", LOOPS)
def test_parts_are_independent(loop: Isa) -> None:
    names = ("Q4_K", "Q6_K", "INT4", "Q8_0", "Q4_K", "Q5_1")
    blocks = [random_blocks(name, 9 + 16 * n, 512) for n, name in enumerate(names)]
    pairs = list(zip(names, blocks, strict=True))
    packed = pack_matrix([rows_of(*pair) for pair in pairs], 512)
    assert packed is not None
    x, bias = random_rows(19, 512), torch.arange(packed.outputs).float()
    alone = torch.cat([bind_packed_product(pack_blocks(*pair), loop=loop)(x) for pair in pairs], -1)
    assert torch.equal(bind_packed_product(packed, bias, loop)(x), alone + bias)
    wanted = np.concatenate([dequantized(*pair) for pair in pairs])
    assert np.array_equal(dequantize_packed(packed).numpy(), wanted)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_rows_that_are_not_finite_do_not_affect_others(name: str, loop: Isa) -> None:
    inputs = 2 * INPUT_MULTIPLES[BLOCK_FORMATS[name]]
    product = bind_packed_product(pack_blocks(name, random_blocks(name, 16, inputs)), loop=loop)
    largest = torch.finfo(torch.float32).max
    for value in (torch.inf, -torch.inf, torch.nan, -torch.nan, largest, -largest, 1e-45, 0.0):
        x = torch.zeros(3, inputs)
        x[1, -1] = value
        found = product(x)
        if not abs(value) < torch.inf:
            assert found[1].isnan().all()
        elif abs(value) < 1:
            assert not found[1].any()
        assert not found[[0, 2]].any()


def test_inputs_may_be_in_another_order() -> None:
    blocks, order = random_blocks("INT4", 33, 96), torch.randperm(96)
    matrix = pack_matrix([rows_of("INT4", blocks)], 96, order)
    assert matrix is not None
    plain = torch.empty(33, 96)
    plain[:, order] = torch.from_numpy(dequantized("INT4", blocks))
    assert torch.equal(dequantize_packed(matrix), plain)
    x = random_rows(5, 96)
    found = bind_packed_product(matrix)(x)
    assert torch.equal(found, bind_packed_product(pack_blocks("INT4", blocks))(x[:, order]))
    assert (found - x @ plain.T).norm() < 0.01 * found.norm()


def test_invalid_arguments_are_refused() -> None:
    packed = pack_blocks("Q4_0", random_blocks("Q4_0", 16, 64))
    product = bind_packed_product(packed)
    for rows in (torch.zeros(1, 32), torch.zeros(1, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match="^x"):
            product(rows)
    with pytest.raises(ValueError, match="bias"):
        bind_packed_product(packed, torch.zeros(15))
    for numbers in ([0, 16], [-1]):
        with pytest.raises(ValueError, match=str(numbers[-1])):
            unpack_rows(packed, torch.tensor(numbers))
    for kind in (BLOCK_FORMATS["Q4_K"], 99):
        with pytest.raises(ValueError, match=f"type {kind}"):
            pack_matrix([FormatRows(kind, np.zeros(1, np.uint64))], 32)
    missing = next(isa for isa in Isa if isa not in LOOPS)
    with pytest.raises(ValueError, match="^loop"):
        bind_packed_product(packed, loop=missing)
