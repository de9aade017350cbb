"""Rounding to blocks of 4 and 8 bits, compared with their definition."""

import pytest
import torch
from torch import Tensor

from helpers import needs_packed_loops
from outpace.kernels import packed
from outpace.kernels.packed import (
    BLOCK_BYTES,
    bind_packed_product,
    build_int4_blocks,
    dequantize_packed,
    pack_blocks,
    quantize_blocks,
)
from packing import dequantized

pytestmark = needs_packed_loops


def weights(out: int = 40, inputs: int = 96) -> Tensor:
    """Return a matrix of different magnitudes, signs and offsets by block."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(out, inputs // 32, 32, generator=generator)
    shift, size = torch.randn(2, out, inputs // 32, 1, generator=generator)
    return ((plain + 2 * shift) * size.mul(3).exp2()).view(out, inputs) / 16


def error(blocks: Tensor, plain: Tensor) -> Tensor:
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    codes = torch.cat((blocks[..., 3:] & 15, blocks[..., 3:] >> 4), -1).float()
    own: Tensor = (codes - blocks[..., 2:3].float()) * scale - plain.view(codes.shape)
    return own.square().sum(-1)


def least_error(plain: Tensor) -> Tensor:
    """Return the least squared error of each block over the pairs that are tried."""
    own = plain.view(len(plain), -1, 32).double()
    low, high = own.amin(-1, keepdim=True).clamp(max=0), own.amax(-1, keepdim=True).clamp(min=0)
    found = torch.full(own.shape[:2], torch.inf, dtype=torch.float64)
    for shift in (-1, 0, 1):
        zero = (-low / (high - low) * 15 + shift).round().clamp(0, 15)
        for part in range(6):
            scale = (high - low) / 15 * (1.05 - 0.07 * part)
            codes = ((own / scale).round() + zero).clamp(0, 15) - zero
            scale = (codes * own).sum(-1, keepdim=True)
            scale = scale / codes.square().sum(-1, keepdim=True).clamp(min=1)
            scale = scale.half().double()
            codes = ((own / scale).round() + zero).clamp(0, 15) - zero
            found = found.minimum((codes * scale - own).square().sum(-1))
    return found.float()


def test_a_block_has_its_definition() -> None:
    codes = torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64)
    scale = torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    blocks = build_int4_blocks(codes, scale, torch.tensor([[3, 15]], dtype=torch.uint8))
    assert blocks.shape == (1, 2, 19)
    plain = (codes.float().view(1, 2, 32) - torch.tensor([3.0, 15.0])[:, None]) * scale[..., None]
    assert torch.equal(torch.from_numpy(dequantized("INT4", blocks.numpy())), plain.flatten(1))
    packed = pack_blocks([blocks], "INT4")
    assert packed is not None and torch.equal(dequantize_packed(packed), plain.flatten(1))


def test_rounding_finds_the_least_error_of_all_pairs() -> None:
    plain, threads = weights(600, 224), torch.get_num_threads()
    wanted = least_error(plain)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            ours = error(quantize_blocks(plain, "INT4"), plain)
            torch.testing.assert_close(ours, wanted, rtol=0.02, atol=0)
            torch.testing.assert_close(ours.sum(), wanted.sum(), rtol=1e-4, atol=0)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", BLOCK_BYTES)
def test_special_blocks(name: str) -> None:
    plain = torch.zeros(4, 64)
    plain[1], plain[2] = 0.25, -0.25
    plain[3] = 1e-9
    packed = pack_blocks([quantize_blocks(plain, name)], name)
    assert packed is not None
    torch.testing.assert_close(dequantize_packed(packed), plain, rtol=1e-3, atol=1e-8)
    plain[0, 0] = 1e9
    assert pack_blocks([quantize_blocks(plain, name)], name) is None


@pytest.mark.parametrize("name", BLOCK_BYTES)
def test_chunks_and_dtypes_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights().bfloat16()
    whole = quantize_blocks(plain.float(), name)
    monkeypatch.setattr(packed, "QUANTIZE_CHUNK", 100)
    assert torch.equal(quantize_blocks(plain, name), whole)
    assert torch.equal(quantize_blocks(plain.T.contiguous().T, name), whole)


def test_8_bits_are_within_half_a_step() -> None:
    plain = weights()
    packed = pack_blocks([quantize_blocks(plain, "Q8_0")], "Q8_0")
    assert packed is not None
    scale = plain.view(40, -1, 32).abs().amax(-1, keepdim=True) / 127
    off = (dequantize_packed(packed) - plain).view(40, -1, 32).abs()
    assert bool((off <= 0.6 * scale).all())


def test_products_are_those_of_the_rounded_matrix() -> None:
    plain, x = weights(), torch.randn(7, 96)
    packed = pack_blocks(
        [quantize_blocks(plain[:16], "INT4"), quantize_blocks(plain[16:], "INT4")], "INT4"
    )
    assert packed is not None
    exact = x @ dequantize_packed(packed).T
    found = bind_packed_product(packed)(x)
    assert 0 < (found - exact).norm() < 0.01 * exact.norm()
    assert 0.01 < (x @ plain.T - exact).norm() / exact.norm() < 0.15
