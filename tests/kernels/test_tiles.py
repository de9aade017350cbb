"""Products of tiles: exact, batch invariant, and refused for invalid arguments."""

import pytest
import torch

from outpace.kernels import tiles
from outpace.kernels.loader import Isa, has_isa, log_missing_instructions
from outpace.kernels.matmul import bind_product, multiply_exactly, quantize_rows

DTYPES = [torch.float32, torch.bfloat16]


FLOAT_LOOPS = [(dtype, loop) for dtype in DTYPES for loop in tiles.TILE_LOOPS[dtype]]


@pytest.fixture(params=FLOAT_LOOPS, ids=lambda pair: f"{pair[0]}-{pair[1].isa.name}")
def looped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    dtype, loop = request.param
    if not has_isa(loop.isa):
        pytest.skip(f"this machine has no {loop.isa.name}")
    monkeypatch.setattr(tiles, "find_loop", lambda dtype: loop)
    return dtype


@pytest.mark.parametrize("shape", [(16, 2), (32, 6), (48, 256), (16, 258), (192, 1026), (64, 9000)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 15, 16, 17, 127, 129])
def test_a_product_of_tiles_is_exact(
    looped: torch.dtype, shape: tuple[int, int], rows: int
) -> None:
    dtype = looped
    torch.manual_seed(rows)
    weight, x = (torch.randn(n, shape[1]).to(dtype) for n in (shape[0], rows))
    bias, laid = torch.randn(shape[0]), tiles.to_tiles(weight)
    assert torch.equal(tiles.from_tiles(laid), weight)
    exact = x.double() @ weight.double().T
    bound = (x.double().abs() @ weight.double().abs().T) * 1e-6 + 1e-6
    eps = 2**-8 if dtype == torch.bfloat16 else 2**-23
    for added in (torch.zeros(shape[0]), bias):
        found = bind_product(laid, added if added.any() else None)(x)
        assert found.dtype == dtype and found.shape == exact.shape
        wanted = exact + added
        assert bool(((found - wanted).abs() <= bound + (wanted.abs() + exact.abs()) * eps).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_matrices_of_whole_tiles_are_tiled(dtype: torch.dtype) -> None:
    odd = [(16, 63)] if dtype.itemsize == 2 else []
    for shape in ((8, 64), (17, 64), (0, 64), (16, 0), *odd):
        assert not tiles.can_tile(torch.ones(shape, dtype=dtype))
    assert tiles.can_tile(torch.ones(32, 64, dtype=dtype)) == tiles.has_tile_loop(dtype)
    assert not tiles.has_tile_loop(torch.float16) and not tiles.has_tile_loop(torch.float64)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_in_their_row(looped: torch.dtype, value: float) -> None:
    weight, x = torch.randn(32, 64).to(looped), torch.randn(3, 64).to(looped)
    x[1, 5] = value
    found = bind_product(tiles.to_tiles(weight))(x)
    wanted = (x.double() @ weight.double().T).to(looped)[1]
    assert torch.equal(found[1].nan_to_num(nan=7), wanted.nan_to_num(nan=7))
    assert not found[1].isfinite().any() and found[[0, 2]].isfinite().all()


def test_rows_are_batch_invariant_in_any_loop(looped: torch.dtype) -> None:
    weight, x = (torch.randn(n, 770).to(looped) for n in (176, 300))
    laid = tiles.to_tiles(weight)
    product = bind_product(laid)
    whole = product(x)
    for rows in (*range(1, 35), 127, 128, 129, 299):
        assert torch.equal(product(x[-rows:]), whole[-rows:]), rows


def test_views_are_multiplied_correctly(looped: torch.dtype) -> None:
    weight, x, bias = torch.randn(64, 32).to(looped), torch.randn(32, 6).to(looped), torch.randn(32)
    laid = tiles.to_tiles(weight[::2])
    for rows in (x.T, x.T[1:4:2], x[:, :1].T.expand(5, -1), x.T.reshape(2, 3, 32)):
        for added in (bias, torch.randn(64)[::2], torch.randn(1).expand(32)):
            found = bind_product(laid, added)(rows)
            assert torch.equal(found, bind_product(laid, added.clone())(rows.clone()))
            exact = rows.double() @ weight[::2].double().T + added
            torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=2**-7)


@pytest.mark.skipif(
    not tiles.has_tile_loop(torch.int8), reason="this machine has no tiles of 8 bits"
)
def test_invalid_arguments_are_refused() -> None:
    x, bias = torch.ones(3, 64), torch.ones(32)
    whole = tiles.to_tiles(torch.ones(32, 64))
    eight = tiles.to_tiles(torch.ones(32, 64, dtype=torch.int8))
    for (rows, *matrix), argument in [
        ((x.bfloat16(), whole), "x"),
        ((x[:, :62], whole), "x"),
        ((x.to("meta"), whole), "x"),
        ((x, whole.transpose(0, 1)), "tiles"),
        ((x, torch.ones(32, 64)), "tiles"),
        ((x, eight), "scales"),
        ((x, whole, None, bias), "scales"),
        ((x, whole, bias[:16]), "bias"),
        ((x, whole, bias.double()), "bias"),
        ((x, whole, bias[None]), "bias"),
        ((x, whole, bias.to("meta")), "bias"),
        ((x, eight, None, bias[:16]), "scale"),
        ((x, eight, None, bias.bfloat16()), "scale"),
    ]:
        with pytest.raises(ValueError, match=rf"\b{argument}\b"):
            tiles.bind_tile_product(*matrix)(rows)
    for weight in (
        torch.ones(16),
        torch.ones(15, 4),
        torch.ones(0, 4),
        torch.ones(16, 3, dtype=torch.bfloat16),
        torch.ones(16, 6, dtype=torch.int8),
        torch.ones(16, 4, dtype=torch.float16),
        torch.ones(16, 4, device="meta"),
    ):
        with pytest.raises(ValueError, match="^weight"):
            tiles.to_tiles(weight)


@pytest.mark.parametrize("loop", tiles.TILE_LOOPS[torch.int8], ids=lambda loop: loop.isa.name)
def test_int8_loops_are_exact(loop: tiles.TileLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_isa(loop.isa):
        pytest.skip(f"this machine has no {loop.isa.name}")
    monkeypatch.setattr(tiles, "find_loop", lambda dtype: loop)
    weight, x = torch.randint(-128, 128, (48, 1100), dtype=torch.int8), torch.randn(131, 1100)
    weight[:2], weight[2], x[:2], x[2] = -128, 127, 1.0, -1.0
    scale, bias = torch.rand(48), torch.randn(48)
    codes, row_scale = quantize_rows(x)
    wanted = multiply_exactly(codes, weight, scale).mul_(row_scale)
    for added in (None, bias):
        product = tiles.bind_tile_product(tiles.to_tiles(weight), added, scale)
        for count in (*range(1, 18), 127, 131):
            exact = wanted if added is None else wanted + added
            assert torch.equal(product(x[:count]), exact[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(80, 1030).to(dtype), torch.randn(19, 1030).to(dtype)
    found = []
    for loop in tiles.TILE_LOOPS[dtype]:
        if has_isa(loop.isa) and loop.isa is not Isa.AVX512_BF16:
            monkeypatch.setattr(tiles, "find_loop", lambda dtype, loop=loop: loop)
            found.append(bind_product(tiles.to_tiles(weight))(x))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    ("present", "level"),
    [
        ([], "WARNING"),
        ([Isa.AVX2], "INFO"),
        ([Isa.AVX2, Isa.AVX512], "INFO"),
        ([Isa.AVX2, Isa.AVX512, Isa.AVX512_VNNI], None),
        ([Isa.NEON], None),
    ],
)
def test_missing_instructions_are_logged(
    present: list[Isa], level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "outpace.kernels.loader"):
        log_missing_instructions(present)
    assert [record.levelname for record in caplog.records] == ([level] if level else [])


def test_instruction_sets_include_those_they_need() -> None:
    assert not has_isa(Isa.AVX512) or has_isa(Isa.AVX2)
    for isa in (Isa.AVX512_VNNI, Isa.AVX512_BF16):
        assert not has_isa(isa) or has_isa(Isa.AVX512)
    assert not (has_isa(Isa.NEON) and has_isa(Isa.AVX2))
