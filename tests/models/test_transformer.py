"""Test which rows the transformer returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace import LLM


@pytest.mark.parametrize("wanted", [[], [4], [0, 2, 2]])
def test_wanted_rows_are_those_of_the_whole(wanted: list[int]) -> None:
    model = LLM("tiny-ar").model

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    ids, positions = torch.arange(5), torch.arange(5)
    with torch.inference_mode():
        whole = model(ids, positions, attend)
        part = model(ids, positions, attend, torch.tensor(wanted, dtype=torch.int64))
    torch.testing.assert_close(part, whole[wanted], atol=1e-5, rtol=1e-5)
