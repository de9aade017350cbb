"""Layouts change the speed of products and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers import whole
from outpace.engine.layout import LARGE, PackedLinear, lay_out, packs
from outpace.models.config import ModelConfig
from outpace.models.transformer import Transformer


def model(*, bidirectional: bool, masked: bool = False) -> Transformer:
    """A model whose MLP is large enough to be packed and whose attention is not."""
    torch.manual_seed(0)
    config = ModelConfig(
        family="dream" if bidirectional else "qwen2",
        architecture="DreamModel" if bidirectional else "Qwen2ForCausalLM",
        vocab=2048,
        dim=256,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=64,
        mlp=1024,
        max_length=64,
        qkv_bias=True,
        bidirectional=bidirectional,
        mask_id=7 if bidirectional or masked else None,
    )
    return Transformer(config).eval().requires_grad_(False)


@pytest.mark.parametrize(("bidirectional", "masked"), [(True, True), (False, False), (False, True)])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_results_stay(bidirectional: bool, masked: bool, rows: int) -> None:
    """For few rows and many, head included."""
    plain = model(bidirectional=bidirectional, masked=masked)
    laid_out = copy.deepcopy(plain)
    lay_out(laid_out)
    ids = list(range(rows))
    before, after = (whole(m, ids, causal=not bidirectional) for m in (plain, laid_out))
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not packs(), reason="this build of PyTorch has no oneDNN")
def test_large_matrices_of_diffusion_models_are_packed() -> None:
    """And small ones are left alone."""
    laid_out = model(bidirectional=True)
    sizes = {name: m.weight.numel() for name, m in laid_out.named_modules() if is_linear(m)}
    lay_out(laid_out)
    packed = {name for name, m in laid_out.named_modules() if isinstance(m, PackedLinear)}
    assert packed == {name for name, size in sizes.items() if size >= LARGE}
    assert "unembedding" in packed and "blocks.0.attention.out" not in packed


def test_matrices_of_causal_models_are_stored_by_column() -> None:
    """With the values and the shape that they had."""
    laid_out = model(bidirectional=False)
    before = laid_out.blocks[0].mlp.down.weight.clone()
    lay_out(laid_out)
    after = laid_out.blocks[0].mlp.down.weight
    assert torch.equal(before, after) and after.stride() == (1, after.shape[0])


@pytest.mark.skipif(not packs(), reason="this build of PyTorch has no oneDNN")
def test_causal_models_that_fill_masks_have_both_layouts() -> None:
    """One row takes the columns, more take the blocks."""
    laid_out = model(bidirectional=False, masked=True)
    weight = laid_out.unembedding.weight.clone()
    lay_out(laid_out)
    head = laid_out.unembedding
    assert isinstance(head, PackedLinear) and isinstance(laid_out.blocks[0].mlp.down, PackedLinear)
    assert head.columns is not None and head.columns.stride() == (1, weight.shape[0])
    head.columns = torch.zeros_like(head.columns)
    assert not head(torch.ones(1, 256)).any()
    torch.testing.assert_close(head(torch.ones(2, 256)), weight.sum(1).expand(2, -1))


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a plain linear layer."""
    return isinstance(module, torch.nn.Linear)
