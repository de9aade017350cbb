"""Models without a gradient have a norm of their own on a CPU."""

from __future__ import annotations

import torch

from helpers import causal_model, whole
from outpace.models.norm import DirectNorm, freeze


def test_a_frozen_model_norms_as_one_that_decodes() -> None:
    """All of its norms, and no parameter asks for a gradient."""
    torch.manual_seed(0)
    model = causal_model().requires_grad_(True)
    before = whole(model, list(range(9)), causal=True)
    freeze(model)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert len(norms) > 2 and {type(norm) for norm in norms} == {DirectNorm}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(whole(model, list(range(9)), causal=True), before)


def test_its_formula_is_kept_to_the_last_bit() -> None:
    """Losses that a teacher or a target has part in depend on it."""
    norm, x = torch.nn.RMSNorm(192, 1e-6), torch.randn(50, 192) * 3
    torch.nn.init.normal_(norm.weight)
    size = torch.linalg.vector_norm(x, 2, -1, True).hypot_(torch.tensor([(1e-6 * 192) ** 0.5]))
    scaled = x * norm.weight.detach()
    expected = torch.addcdiv(torch.tensor([0.0]), scaled, size, value=192**0.5)
    freeze(norm)
    assert torch.equal(norm(x), expected)
