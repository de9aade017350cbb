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
from outpace.engine import layout
from outpace.engine.layout import (
    LARGE,
    MEDIUM,
    PIECE,
    FixedLinear,
    OwnHead,
    become,
    lay_out,
    packs,
    undo,
)
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
@pytest.mark.parametrize("rows", [1, 2, 33, PIECE + 1, 2 * PIECE])
def test_results_stay(bidirectional: bool, rows: int) -> None:
    """For few rows and many, head included."""
    plain = model(bidirectional=bidirectional)
    laid_out = copy.deepcopy(plain)
    lay_out(laid_out)
    ids = list(range(rows))
    before, after = (whole(m, ids, causal=not bidirectional) for m in (plain, laid_out))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not packs(), reason="this build of PyTorch has no oneDNN")
@pytest.mark.parametrize("bidirectional", [True, False])
def test_matrices_are_packed_by_size(bidirectional: bool) -> None:
    """Large ones only, medium ones beside a copy by column; small ones are stored by column."""
    laid_out = model(bidirectional=bidirectional)
    sizes = {name: m.weight.numel() for name, m in laid_out.named_modules() if is_linear(m)}
    lay_out(laid_out)
    fixed = {name: m for name, m in laid_out.named_modules() if isinstance(m, FixedLinear)}
    assert fixed.keys() == sizes.keys()
    for name, size in sizes.items():
        assert (fixed[name].packed is None) == (size < MEDIUM)
        assert (fixed[name].columns is None) == (size >= LARGE)
    assert min(sizes.values()) < MEDIUM and max(sizes.values()) >= LARGE


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_tied_head(bidirectional: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one of a causal model lies by column; all but huge ones have a copy for many rows."""
    monkeypatch.setattr(layout, "HUGE", 192 * 3072)
    for vocab in (1024, 2048, 3072):
        laid_out = model(bidirectional=bidirectional, vocab=vocab, tied=True)
        before, hidden = laid_out.embedding.weight.clone(), torch.randn(rows, 192)
        names = dict(laid_out.named_parameters()).keys()
        lay_out(laid_out)
        after = laid_out.embedding.weight
        assert torch.equal(before, after)
        assert (after.stride(0) == 1) == (vocab > 1024 and not bidirectional)
        assert isinstance(laid_out, OwnHead) == (vocab < 3072 and packs())
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
