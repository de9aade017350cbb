"""A sink takes part of a row's weight and is not a key."""

import pytest
import torch
from torch.nn import functional as F

from outpace.attention import dense
from outpace.attention.dense import sink_attention

HEADS, KEYS, ROWS, SLOTS, SIZE = 4, 2, 5, 7, 8
MASK = torch.arange(SLOTS) <= torch.arange(ROWS)[:, None] + 2
BIAS = torch.zeros(ROWS, SLOTS).masked_fill(~MASK, -torch.inf)


def rows() -> tuple[torch.Tensor, ...]:
    """Return queries, keys, values and sinks of two sequences."""
    torch.manual_seed(0)
    q, k = torch.randn(2, HEADS, ROWS, SIZE), torch.randn(2, KEYS, SLOTS, SIZE)
    return q, k, torch.randn(2, KEYS, SLOTS, SIZE), torch.randn(1, HEADS, 1, 1)


def with_a_key(*tensors: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attend with an additional key that has the sink as its score and a zero value."""
    q, k, v, sink = tensors
    k, v = (F.pad(x.repeat_interleave(HEADS // KEYS, 1), (0, 0, 0, 1)) for x in (k, v))
    own = torch.ones(ROWS, SLOTS, dtype=torch.bool) if mask is None else mask
    bias = torch.zeros(1, HEADS, ROWS, SLOTS).masked_fill(~own, -torch.inf)
    bias = torch.cat((bias, sink.expand(1, HEADS, ROWS, 1)), -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize("most", [2**26, 150])
@pytest.mark.parametrize("mask", [None, MASK, BIAS], ids=["all", "mask", "bias"])
def test_it_is_a_key_without_a_value(
    mask: torch.Tensor | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "MAX_SCORES", most)
    q, k, v, sink = rows()
    found = sink_attention(q, k, v, mask, sinks=sink)
    torch.testing.assert_close(
        found, with_a_key(q, k, v, sink, mask=MASK if mask is not None else None)
    )


def test_rows_may_be_causal() -> None:
    q, k, v, sink = rows()
    k, v = k[:, :, :ROWS], v[:, :, :ROWS]
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    torch.testing.assert_close(
        sink_attention(q, k, v, causal=True, sinks=sink), sink_attention(q, k, v, mask, sinks=sink)
    )


def test_extreme_sinks() -> None:
    q, k, v, sink = rows()
    plain = sink_attention(q, k, v)
    torch.testing.assert_close(sink_attention(q, k, v, sinks=sink - 1e4), plain)
    torch.testing.assert_close(sink_attention(q, k, v, sinks=sink + 1e4), torch.zeros_like(plain))


def test_half_precision_and_gradients() -> None:
    tensors = [x.clone().requires_grad_() for x in rows()]
    q, k, v, sink = tensors
    sink_attention(q, k, v, MASK, sinks=sink).square().sum().backward()
    assert all(x.grad is not None and bool(x.grad.any()) for x in tensors)
    half = sink_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), MASK, sinks=sink.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(
        half.float(), sink_attention(q, k, v, MASK, sinks=sink), atol=0.05, rtol=0.05
    )
