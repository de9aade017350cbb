"""Layouts change the speed of products and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers import whole
from outpace.engine.layout import LARGE, MEDIUM, FixedLinear, lay_out, packs
from outpace.models.config import ModelConfig
from outpace.models.transformer import Transformer


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
        max_length=64,
        qkv_bias=True,
        tied=tied,
        bidirectional=bidirectional,
        mask_id=7 if bidirectional else None,
    )
    return Transformer(config).eval().requires_grad_(False)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 33])
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
def test_a_tied_head(bidirectional: bool) -> None:
    """A large one of a causal model is stored by column, a medium one is laid out as others are."""
    for vocab in (1024, 2048):
        laid_out = model(bidirectional=bidirectional, vocab=vocab, tied=True)
        before, hidden = laid_out.embedding.weight.clone(), torch.randn(3, 192)
        lay_out(laid_out)
        after = laid_out.embedding.weight
        assert torch.equal(before, after)
        assert (after.stride(0) == 1) == (vocab == 2048 and not bidirectional)
        assert isinstance(laid_out.unembedding, FixedLinear) == (vocab == 1024 and packs())
        torch.testing.assert_close(laid_out.head(hidden), hidden @ before.T, atol=1e-4, rtol=1e-4)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a plain linear layer."""
    return isinstance(module, torch.nn.Linear)
