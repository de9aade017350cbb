"""Layouts change the speed of products and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers import feature_draft, whole
from outpace.decoding import FULL, Forward, Sample
from outpace.engine.layout import LARGE, PackedLinear, lay_out, packs
from outpace.engine.naive import Memory, answer
from outpace.engine.runner import Runner
from outpace.models.config import ModelConfig
from outpace.models.transformer import Transformer


def model(*, bidirectional: bool) -> Transformer:
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
        mask_id=7 if bidirectional else None,
    )
    return Transformer(config).eval().requires_grad_(False)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_results_stay(bidirectional: bool, blocks: bool, rows: int) -> None:
    """For few rows and many, head included."""
    plain = model(bidirectional=bidirectional)
    laid_out = copy.deepcopy(plain)
    lay_out(laid_out)
    if blocks:
        lay_out(laid_out, blocks=True)
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
def test_causal_models_that_are_fed_blocks_have_both() -> None:
    """From the moment on that a method of that kind is asked for."""
    target = model(bidirectional=False)
    runner = Runner("target", target, slots=64)
    assert not any(isinstance(module, PackedLinear) for module in target.modules())
    before = target.blocks[0].mlp.down.weight
    runner.expect_blocks()
    runner.expect_blocks()
    down = target.blocks[0].mlp.down
    assert isinstance(down, PackedLinear) and down.weight is before
    assert before.stride() == (1, before.shape[0])


def test_draft_of_large_matrices_is_packed_and_fed_context() -> None:
    """Its keys and values come from rows of features as well."""
    target = model(bidirectional=False)
    fields = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
    fields |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    draft = feature_draft(target, **fields)
    plain = copy.deepcopy(draft)
    forward = Forward(
        ids=[1, 2, 3],
        start=5,
        mask=FULL,
        predict=[6, 7],
        read=Sample(keep=True),
        context=torch.randn(5, draft.config.features),
    )
    runner = Runner("draft", draft, slots=64)
    table = runner.cache.reserve(16)
    (prediction,) = runner.run([forward], [table])
    expected = answer(forward, Memory(plain)).logits
    torch.testing.assert_close(prediction.logits, expected, atol=1e-3, rtol=1e-3)
    assert isinstance(draft.blocks[0].attention.qkv, PackedLinear) is packs()


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a plain linear layer."""
    return isinstance(module, torch.nn.Linear)
