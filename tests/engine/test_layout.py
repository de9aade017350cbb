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
from outpace.engine import layout, quickest
from outpace.engine.layout import (
    LARGE,
    PIECE,
    SMALL,
    FixedLinear,
    OwnHead,
    become,
    choose,
    lay_out,
    undo,
)
from outpace.engine.quickest import MANY, ROWS, STEP, blocked, packs, product
from outpace.models.config import ModelConfig
from outpace.models.load import save_model
from outpace.models.norm import DirectNorm
from outpace.models.transformer import Transformer

FILE = "model.safetensors"
SIZES = {"hidden_size": 192, "vocab_size": 1024}


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


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 33, MANY + 1, PIECE + 1, 2 * PIECE])
def test_results_stay(bidirectional: bool, rows: int) -> None:
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


@pytest.mark.skipif(not packs(torch.float32), reason="this build of PyTorch has no oneDNN")
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("one", ["blocks", "columns"])
@pytest.mark.parametrize("more", ["blocks", "columns"])
def test_the_quickest_layout_is_taken(
    bidirectional: bool, one: str, more: str, monkeypatch: pytest.MonkeyPatch
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
def test_chance_chooses_no_layout(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "blocks" in line and "columns" in line and "(1, 4, 16, 64)" in line
    assert len(set(chosen)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fault", [AttributeError("no such operator"), RuntimeError("no avx512")])
def test_without_blocks_models_keep_their_layout(
    dtype: torch.dtype, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor or a build of PyTorch without them; what comes out is the same."""

    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise fault

    monkeypatch.setattr(quickest, "blocked", missing)
    quickest.packs.cache_clear()
    plain = model(bidirectional=False, tied=True).to(dtype)
    laid_out = copy.deepcopy(plain)
    lay_out(laid_out)
    quickest.packs.cache_clear()
    assert not any(isinstance(m, FixedLinear | OwnHead) for m in laid_out.modules())
    assert laid_out.embedding.weight.stride(0) == 1
    before, after = (whole(m, [3, 1, 4], causal=True) for m in (plain, laid_out))
    torch.testing.assert_close(after, before, atol=1e-3, rtol=2e-2)


@pytest.mark.skipif(not packs(torch.bfloat16), reason="this processor has no blocks of bfloat16")
@pytest.mark.parametrize("shape", [(192, 192), (1152, 896), (896, 4864)])
def test_a_row_of_bfloat16_does_not_change_with_its_company(shape: tuple[int, int]) -> None:
    """Bit by bit in blocks, as far as 64 rows."""
    torch.manual_seed(0)
    weight, x = (torch.randn(n, shape[1]).bfloat16() for n in (shape[0], 64))
    blocks = quickest.blocked(weight)
    whole = quickest.product(x, blocks, None)
    for rows in (1, 2, 3, 4, 7, 15, 16, 17, 33):
        assert torch.equal(quickest.product(x[:rows], blocks, None), whole[:rows]), rows


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_tied_head(bidirectional: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but huge ones have a copy; without blocks, that of a causal model lies by column."""
    monkeypatch.setattr(layout, "HUGE", 4 * 192 * 3072)
    for vocab in (1024, 2048, 3072):
        laid_out = model(bidirectional=bidirectional, vocab=vocab, tied=True)
        before, hidden = laid_out.embedding.weight.clone(), torch.randn(rows, 192)
        names = dict(laid_out.named_parameters()).keys()
        lay_out(laid_out)
        after = laid_out.embedding.weight
        assert torch.equal(before, after)
        assert (after.stride(0) == 1) == (not packs(torch.float32) and not bidirectional)
        assert isinstance(laid_out, OwnHead) == packs(torch.float32)
        if isinstance(laid_out, OwnHead):
            head = laid_out.own[0].more
            shared = not head.is_mkldnn and head.data_ptr() == after.data_ptr()
            assert shared == (vocab == 3072)
        assert dict(laid_out.named_parameters()).keys() == names
        torch.testing.assert_close(laid_out.head(hidden), hidden @ before.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1024, 2048])
@pytest.mark.parametrize("tied", [True, False])
def test_a_layout_is_undone(dtype: torch.dtype, vocab: int, tied: bool) -> None:
    """To the same classes and the same bits, which fire their hooks again."""
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


def test_a_model_that_decodes_can_be_saved(tmp_path: Path) -> None:
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
