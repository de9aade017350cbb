"""Compare ranges with the equivalent boolean masks."""

import pytest
import torch
from torch.nn import functional

from outpace.attention.ranges import (
    HullAttention,
    RangesAttention,
    causal_ranges,
    dense_mask,
    document_ranges,
    find_documents,
    full_ranges,
    grouped_ranges,
)


def two_ranges() -> torch.Tensor:
    """Return four causal context rows, then two blocks of two that see a prefix and themselves."""
    ranges = torch.zeros(8, 2, 2, dtype=torch.int32)
    ranges[:4] = causal_ranges(4)
    ranges[4:6] = torch.tensor([[0, 2], [4, 6]])
    ranges[6:8] = torch.tensor([[0, 3], [6, 8]])
    return ranges


def packed() -> torch.Tensor:
    """Concatenate documents of several kinds and lengths."""
    parts = [causal_ranges(3), causal_ranges(3), full_ranges(3), full_ranges(5)]
    parts += [two_ranges(), two_ranges(), causal_ranges(1)]
    starts = torch.tensor([0, *[len(part) for part in parts[:-1]]]).cumsum(0)
    return torch.cat([part + int(start) for part, start in zip(parts, starts, strict=True)])


def brute(ranges: torch.Tensor) -> torch.Tensor:
    """Compute the mask of the ranges entry by entry."""
    rows = range(len(ranges))
    return torch.tensor(
        [[any(a <= key < b for a, b in ranges[row].tolist()) for key in rows] for row in rows]
    )


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


def test_the_dense_mask_equals_the_ranges() -> None:
    ranges = packed()
    assert torch.equal(dense_mask(ranges, len(ranges)), brute(ranges))


def test_documents_are_cut_where_no_row_sees_across() -> None:
    spans = find_documents(packed())
    assert spans == [(0, 3), (3, 6), (6, 9), (9, 14), (14, 22), (22, 30), (30, 31)]


def test_a_row_that_sees_only_later_or_earlier_keys_joins_them() -> None:
    ranges = torch.zeros(4, 2, 2, dtype=torch.int32)
    ranges[0, 0] = torch.tensor([1, 2])
    ranges[3, 0] = torch.tensor([2, 3])
    assert find_documents(ranges) == [(0, 2), (2, 4)]


def test_a_row_of_a_group_sees_to_its_end() -> None:
    sees = dense_mask(grouped_ranges([2, 3, 1]), 6)
    assert sees.sum(1).tolist() == [2, 2, 5, 5, 5, 6]
    assert torch.equal(grouped_ranges([1, 1, 1]), causal_ranges(3)) and torch.equal(
        grouped_ranges([3]), full_ranges(3)
    )


def test_whole_documents_are_seen_by_their_rows_alone() -> None:
    parts = [grouped_ranges([2, 3]), causal_ranges(1), two_ranges()]
    ranges = torch.cat([part + start for part, start in zip(parts, (0, 5, 6), strict=True)])
    for each in (ranges, document_ranges(ranges)):
        assert find_documents(each) == [(0, 5), (5, 6), (6, 14)]
    sees = dense_mask(document_ranges(ranges), len(ranges))
    assert torch.equal(sees, torch.block_diag(*(torch.ones(n, n) for n in (5, 1, 8))).bool())


def test_neighbours_of_one_length_and_kind_share_a_call() -> None:
    pieces = RangesAttention(packed()).batches
    assert [(piece.count, piece.length) for piece in pieces[:3]] == [(2, 3), (1, 3), (1, 5)]


def equal_with_gradients(
    got: torch.Tensor, want: torch.Tensor, given: tuple[torch.Tensor, ...]
) -> None:
    """Assert that two results, and the gradients of a loss on them, are equal."""
    assert torch.allclose(got, want, atol=1e-5)
    weights = torch.randn_like(want)
    for ours, theirs in zip(
        torch.autograd.grad((got * weights).sum(), given),
        torch.autograd.grad((want * weights).sum(), given),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_one_masked_call_and_so_do_gradients(kv_heads: int) -> None:
    torch.manual_seed(0)
    ranges = packed()
    q = torch.randn(len(ranges), 4, 8, requires_grad=True)
    k, v = (torch.randn(len(ranges), kv_heads, 8, requires_grad=True) for _ in "kv")
    equal_with_gradients(
        RangesAttention(ranges)(0, q, k, v), attention(q, k, v, brute(ranges)), (q, k, v)
    )


def blocks(anchors: list[int], context: int, size: int) -> torch.Tensor:
    """Return ranges of blocks over a context, whose keys come first, and themselves."""
    ranges = torch.zeros(len(anchors), size, 2, 2, dtype=torch.int32)
    for number, anchor in enumerate(anchors):
        own = context + number * size
        ranges[number, :] = torch.tensor([[0, anchor], [own, own + size]])
    return ranges.flatten(0, 1)


@pytest.mark.parametrize("runs", [[12], [3, 9], [6, 3, 3], [5, 7]])
def test_attention_over_other_keys_equals_one_masked_call(runs: list[int]) -> None:
    torch.manual_seed(0)
    ranges = blocks([0, 2, 5, 7], 9, 3)
    q = torch.randn(12, 4, 8, requires_grad=True)
    k, v = (torch.randn(9 + 12, 2, 8, requires_grad=True) for _ in "kv")
    equal_with_gradients(
        HullAttention(ranges, runs)(0, q, k, v),
        attention(q, k, v, dense_mask(ranges, 21)),
        (q, k, v),
    )


def test_a_run_receives_only_visible_keys() -> None:
    ranges = blocks([2, 3, 40, 90], 100, 4)
    one, four = (HullAttention(ranges, runs) for runs in ([16], [4] * 4))
    assert [tuple(piece.mask.shape) for piece in one.batches] == [(16, 90 + 16)]
    assert [piece.mask.shape[1] for piece in four.batches] == [2 + 4, 3 + 4, 40 + 4, 90 + 4]
    assert all(piece.mask.all() for piece in four.batches)
