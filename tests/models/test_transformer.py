"""The transformer: what comes back where only some rows are wanted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace import LLM
from outpace.models.transformer import RMSNorm


@pytest.mark.parametrize("wanted", [[], [4], [0, 2, 2]])
def test_wanted_rows_are_those_of_the_whole(wanted: list[int]) -> None:
    model = LLM("tiny-ar").engine.runners[-1].model

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    ids, positions = torch.arange(5), torch.arange(5)
    with torch.inference_mode():
        whole = model(ids, positions, attend)
        part = model(ids, positions, attend, torch.tensor(wanted, dtype=torch.int64))
    torch.testing.assert_close(part, whole[wanted], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_norm_without_a_gradient_is_the_norm(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(96, 1e-5)
    torch.nn.init.normal_(norm.weight)
    norm, x = norm.to(dtype), (torch.randn(3, 2, 96) * scale).to(dtype)
    with torch.no_grad():
        fast = norm(x)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = exact * norm.weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast.double(), exact, atol=tolerance, rtol=tolerance)
    assert fast.dtype == dtype
