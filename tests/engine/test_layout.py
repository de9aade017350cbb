"""Layouts change the speed of products and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers import whole
from outpace.engine.layout import MANY_ROWS, ONE_ROW, PackedLinear, lay_out, packs
from outpace.models.config import ModelConfig
from outpace.models.transformer import Transformer


def model(*, bidirectional: bool) -> Transformer:
    """A model whose MLP is large enough to be packed and whose attention is not."""
    torch.manual_seed(0)
    config = ModelConfig(
        family="dream" if bidirectional else "qwen2",
        architecture="DreamModel" if bidirectional else "Qwen2ForCausalLM",
        vocab=2048,
        dim=192,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=64,
        mlp=1024,
        max_length=64,
        qkv_bias=True,
        tied=not bidirectional,
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
@pytest.mark.parametrize(("bidirectional", "large"), [(True, MANY_ROWS), (False, ONE_ROW)])
def test_large_matrices_are_packed(bidirectional: bool, large: int) -> None:
    """And small ones are left alone; which are small depends on the rows."""
    laid_out = model(bidirectional=bidirectional)
    sizes = {name: m.weight.numel() for name, m in laid_out.named_modules() if is_linear(m)}
    lay_out(laid_out)
    packed = {name for name, m in laid_out.named_modules() if isinstance(m, PackedLinear)}
    assert packed == {name for name, size in sizes.items() if size >= large}
    assert "blocks.0.mlp.gate_up" in packed
    assert ("blocks.0.attention.qkv" in packed) == bidirectional


def test_a_tied_head_of_a_causal_model_is_stored_by_column() -> None:
    """With the values and the shape that it had."""
    laid_out = model(bidirectional=False)
    before = laid_out.embedding.weight.clone()
    lay_out(laid_out)
    after = laid_out.embedding.weight
    assert torch.equal(before, after) and after.stride() == (1, after.shape[0])


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a plain linear layer."""
    return isinstance(module, torch.nn.Linear)
