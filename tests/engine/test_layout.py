"""Layouts change the speed of products and nothing else."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import published, whole
from outpace.decoding import Kind
from outpace.engine.layout import (
    LARGE,
    PIECE,
    SMALL,
    FixedLinear,
    OwnHead,
    TiledEmbedding,
    become,
    choose,
    lay_out,
    undo,
)
from outpace.models import layouts, quickest, tiles
from outpace.models.config import ModelConfig
from outpace.models.layouts import LAYOUTS, MANY, STEP, blocked, has, product
from outpace.models.load import save_model
from outpace.models.norm import DirectNorm
from outpace.models.quickest import ROWS
from outpace.models.transformer import Transformer

FILE = "model.safetensors"
SIZES = {"hidden_size": 192, "vocab_size": 1024}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def untiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without tiles."""
    monkeypatch.setattr(tiles, "usable", lambda dtype: False)
    monkeypatch.setattr(layouts, "has", lambda name, dtype: name == "blocks" and has(name, dtype))
    monkeypatch.setattr("outpace.engine.layout.has", layouts.has)


def model(*, bidirectional: bool, vocab: int = 2048, tied: bool = False) -> Transformer:
    """A model with matrices of all sizes."""
    torch.manual_seed(0)
    config = ModelConfig(
        family="dream" if bidirectional else "qwen2",
        architecture="DreamModel" if bidirectional else "Qwen2ForCausalLM",
        vocab=vocab,
        dim=192,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=1024,
        max_length=2 * PIECE,
        qkv_bias=True,
        tied=tied,
        kind=Kind.DIFFUSION if bidirectional else Kind.CAUSAL,
        mask_id=7 if bidirectional else None,
    )
    return Transformer(config).eval().requires_grad_(False)


@pytest.fixture(params=["tiled", "untiled"])
def machine(request: pytest.FixtureRequest) -> str:
    """With tiles, as far as this one has them, and without."""
    if request.param == "untiled":
        request.getfixturevalue("untiled")
    name: str = request.param
    return name


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 33, MANY + 1, PIECE + 1, 2 * PIECE])
def test_results_stay(machine: str, bidirectional: bool, rows: int) -> None:
    """For few rows and many, head included."""
    plain = model(bidirectional=bidirectional)
    laid_out = copy.deepcopy(plain)
    lay_out(laid_out)
    ids = list(range(rows))
    before, after = (whole(m, ids, causal=not bidirectional) for m in (plain, laid_out))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_many_rows_share_kernels() -> None:
    """So a row is the same to the last bit among any number of rows up to the next multiple."""
    weight, rows = blocked(torch.randn(96, 64)), torch.randn(MANY + STEP, 64)
    whole = product(rows, weight, None)
    for count in range(MANY + 1, MANY + STEP):
        some = product(rows[:count], weight, None)
        assert torch.equal(some, whole[:count])


def fake(monkeypatch: pytest.MonkeyPatch, **best: str) -> None:
    """Let one layout be the quickest for one row, and one for more."""

    def seconds(shape, dtype, layouts, threads):
        one, more = best.get("one", best["more"]), best["more"]
        return {
            name: {count: 1.0 if name == (one if count == 1 else more) else 2.0 for count in ROWS}
            for name in layouts
        }

    monkeypatch.setattr(quickest, "seconds", seconds)


@pytest.mark.skipif(not has("blocks", torch.float32), reason="this build of PyTorch has no oneDNN")
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("one", ["blocks", "columns"])
@pytest.mark.parametrize("more", ["blocks", "columns"])
def test_the_quickest_layout_is_taken(
    bidirectional: bool, one: str, more: str, untiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small matrices are not tried, medium ones may have two layouts, and large ones have one."""
    fake(monkeypatch, one=one, more=more)
    laid_out = model(bidirectional=bidirectional)
    sizes = {name: m.weight.numel() for name, m in laid_out.named_modules() if is_linear(m)}
    lay_out(laid_out)
    fixed = {name: m for name, m in laid_out.named_modules() if isinstance(m, FixedLinear)}
    assert fixed.keys() == sizes.keys()
    for name, size in sizes.items():
        found = fixed[name].one.is_mkldnn, fixed[name].more.is_mkldnn
        if size >= LARGE:
            assert found == (True, True)  # columns are not tried
        elif size >= SMALL:
            assert found == (one == "blocks", more == "blocks")
    assert max(sizes.values()) >= LARGE > min(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chance_chooses_no_layout(
    dtype: torch.dtype, untiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual one is left for one that takes less than seven tenths of the time, summed up."""
    times = {"blocks": dict.fromkeys(ROWS, 1.0), "rows": dict.fromkeys(ROWS, 0.75)}
    monkeypatch.setattr(quickest, "seconds", lambda *_: times)
    weight = torch.ones(LARGE // 512, 512, dtype=dtype)
    assert choose(weight) == ("blocks", "blocks")
    times["rows"] = dict.fromkeys(ROWS, 0.75) | {1: 0.3}
    assert choose(weight) == ("rows", "rows")  # one for all numbers of rows


def test_layouts_are_tried_once_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """For each shape, dtype and number of threads."""
    weight = torch.ones(384, 208)
    with caplog.at_level("INFO", "outpace"):
        chosen = [choose(weight) for _ in range(3)]
    (line,) = [r.message for r in caplog.records if "384 x 208" in r.message]
    assert "blocks" in line and "(1, 4, 16, 64)" in line
    assert ("tiles" in line) == tiles.usable(torch.float32) != ("columns" in line)
    assert len(set(chosen)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", [AttributeError("no such operator"), RuntimeError("no avx512")])
def test_without_blocks_models_keep_their_layout(
    dtype: torch.dtype, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor or a build of PyTorch without them; what comes out is the same."""

    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise fault

    monkeypatch.setitem(layouts.LAYOUTS, "blocks", missing)  # type: ignore[arg-type]
    monkeypatch.setattr(tiles, "usable", lambda dtype: False)
    has.cache_clear()
    plain = model(bidirectional=False, tied=True).to(dtype)
    laid_out = copy.deepcopy(plain)
    lay_out(laid_out)
    has.cache_clear()
    assert not any(isinstance(m, FixedLinear | OwnHead) for m in laid_out.modules())
    assert laid_out.embedding.weight.stride(0) == 1
    before, after = (whole(m, [3, 1, 4], causal=True) for m in (plain, laid_out))
    torch.testing.assert_close(after, before, atol=1e-3, rtol=2e-2)


@pytest.mark.parametrize(
    "name, dtype", [("blocks", torch.bfloat16), *[("tiles", d) for d in DTYPES]]
)
@pytest.mark.parametrize("shape", [(192, 192), (1152, 896), (896, 4864)])
def test_a_row_does_not_change_with_its_company(
    name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Bit by bit, as far as 64 rows in blocks; in tiles among any number, on any of threads."""
    if not has(name, dtype):
        pytest.skip(f"this machine has no {name} of {dtype}")
    torch.manual_seed(0)
    weight, x = (torch.randn(n, shape[1]).to(dtype) for n in (shape[0], 300))
    laid, threads = LAYOUTS[name](weight), torch.get_num_threads()
    whole = product(x if name == "tiles" else x[:64], laid)
    for rows in (1, 2, 3, 4, 7, 15, 16, 17, 33):
        assert torch.equal(product(x[:rows], laid), whole[:rows]), rows
    try:
        torch.set_num_threads(3)
        assert torch.equal(product(x[:17], laid), whole[:17])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 2), (32, 6), (48, 256), (16, 258), (192, 1026), (64, 9000)])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 15, 16, 17, 127, 129])
def test_a_product_of_tiles_is_exact(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    """Within the rounding of its dtype, of any number of rows, with a bias and without."""
    if not has("tiles", dtype):
        pytest.skip(f"this machine has no tiles of {dtype}")
    torch.manual_seed(rows)
    weight, x = (torch.randn(n, shape[1]).to(dtype) for n in (shape[0], rows))
    bias, laid = torch.randn(shape[0]), tiles.laid(weight)
    assert torch.equal(tiles.plain(laid), weight)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    bound = scale * 1e-6 + exact.abs() * (2**-8 if dtype == torch.bfloat16 else 2**-23)
    for added in (None, bias):
        found = product(x, laid, added)
        assert found.dtype == dtype and found.shape == exact.shape
        wanted = exact if added is None else exact + added
        assert bool(
            (
                (found.double() - wanted).abs()
                <= bound + wanted.abs() * 2**-8 * (dtype == torch.bfloat16) + 1e-6
            ).all()
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_matrices_that_fill_tiles_lie_in_them(dtype: torch.dtype) -> None:
    """All others keep the layouts that they had."""
    for shape in (
        (8, 64),
        (17, 64),
        (0, 64),
        (16, 0),
        *([(16, 63)] if dtype.itemsize == 2 else []),
    ):
        assert not tiles.fits(torch.ones(shape, dtype=dtype))
    assert tiles.fits(torch.ones(32, 64, dtype=dtype)) == tiles.usable(dtype)
    assert not tiles.usable(torch.float16) and not tiles.usable(torch.float64)


def test_what_is_no_number_stays_in_its_row() -> None:
    """NaN and infinities, and is not hidden there."""
    if not has("tiles", torch.float32):
        pytest.skip("this machine has no tiles")
    for dtype in DTYPES if has("tiles", torch.bfloat16) else DTYPES[:1]:
        weight, x = torch.randn(32, 64, dtype=dtype), torch.randn(3, 64, dtype=dtype)
        x[1, 5] = torch.nan
        found = product(x, tiles.laid(weight))
        assert found[1].isnan().all() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_tied_head(
    bidirectional: bool, rows: int, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but large ones have a copy, and large tiles serve both; without blocks and tiles, that of
    a causal model lies by column."""
    monkeypatch.setattr(tiles, "LARGE", 4 * 192 * 3072)
    tiled = machine == "tiled" and tiles.usable(torch.float32)
    blocks = has("blocks", torch.float32)
    for vocab in (1024, 2048, 3072):
        laid_out = model(bidirectional=bidirectional, vocab=vocab, tied=True)
        before, hidden = laid_out.embedding.weight.clone(), torch.randn(rows, 192)
        names = dict(laid_out.named_parameters()).keys()
        lay_out(laid_out)
        if tiled and vocab == 3072:
            assert isinstance(laid_out.embedding, TiledEmbedding)
        else:
            after = laid_out.embedding.weight
            assert torch.equal(before, after)
            assert (after.stride(0) == 1) == (not tiled and not blocks and not bidirectional)
            assert isinstance(laid_out, OwnHead) == (tiled or blocks)
        if isinstance(laid_out, OwnHead):
            head = laid_out.own[0].more
            shared = not head.is_mkldnn and head.data_ptr() == after.data_ptr()
            assert shared == (vocab == 3072)
        assert dict(laid_out.named_parameters()).keys() == names
        ids = torch.tensor([5, 0, vocab - 1])
        assert torch.equal(laid_out.embed(ids), before[ids])
        assert torch.equal(laid_out.state_dict()["embedding.weight"], before)
        torch.testing.assert_close(laid_out.head(hidden), hidden @ before.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1024, 2048])
@pytest.mark.parametrize("tied", [True, False])
def test_a_layout_is_undone(
    dtype: torch.dtype, vocab: int, tied: bool, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same classes and the same bits, which fire their hooks again."""
    monkeypatch.setattr(tiles, "LARGE", 2048 * 192 * dtype.itemsize)
    plain = model(bidirectional=False, vocab=vocab, tied=tied).to(dtype)
    laid_out = copy.deepcopy(plain)
    lay_out(laid_out)
    assert [n for n, _ in laid_out.named_parameters()] == [n for n, _ in plain.named_parameters()]
    undo(laid_out)
    assert list(map(type, laid_out.modules())) == list(map(type, plain.modules()))
    for (name, ours), (_, theirs) in zip(
        laid_out.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride(), name
    fired: list[str] = []
    for name, module in laid_out.named_modules():
        if not list(module.children()) and name != "embedding":
            module.register_forward_hook(lambda *_, name=name: fired.append(name))
    whole(laid_out, [1, 2, 3], causal=True)
    assert len(fired) == sum(1 for m in plain.modules() if not list(m.children())) - 1


def test_a_model_that_decodes_can_be_saved(machine: str, tmp_path: Path) -> None:
    """Every tensor, bit by bit, whatever its layout."""
    plain = model(bidirectional=False, vocab=1024, tied=True)
    plain.config = replace(plain.config, source=published(**SIZES))
    laid_out = copy.deepcopy(plain)
    lay_out(laid_out)
    for name, each in (("plain", plain), ("laid-out", laid_out)):
        save_model(each, tmp_path / name, dtype=torch.float32)
    before, after = (load_file(tmp_path / name / FILE) for name in ("plain", "laid-out"))
    assert before.keys() == after.keys() and len(before) == 26
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_a_norm_that_is_called_directly_is_the_norm(dtype: torch.dtype, scale: float) -> None:
    """Of small numbers and large ones."""
    torch.manual_seed(0)
    norm = torch.nn.RMSNorm(96, 1e-5).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    norm, x = norm.to(dtype), (torch.randn(3, 2, 96) * scale).to(dtype)
    become(norm, DirectNorm)
    fast = norm(x)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = exact * norm.weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast.double(), exact, atol=tolerance, rtol=tolerance)
    assert fast.dtype == dtype


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a plain linear layer."""
    return isinstance(module, torch.nn.Linear)
