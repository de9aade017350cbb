"""A row of the compiled loop has the same bits alone, in a batch, and on every processor."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outpace.attention import compiled
from outpace.attention.batch import RowSpan
from outpace.attention.compiled import ATTENTION_LOOPS, CompiledAttention, find_attention_loop
from outpace.attention.dense import DenseAttention
from outpace.decoding.tree import Tree
from outpace.engine.cache import PAGE_SIZE
from outpace.kernels.loader import has_isa
from spans import AHEAD, FAR, TREE, attend, random, spans_of, stored

pytestmark = pytest.mark.skipif(
    find_attention_loop() is None,
    reason="no compiled loop: apt-get install gcc, and reinstall outpace",
)
DTYPES = [torch.float32, torch.bfloat16]
CACHES = [*DTYPES, torch.float16, torch.int8]
MIXED = [
    (60, 1, "causal"),
    (9, 16, "full"),
    (0, 5, (2, 3)),
    (3, 4, 40),
    (68, 10, TREE),
    (83, 3, FAR),
    (97, 11, AHEAD),
    (130, 3, "causal"),
]


class Pass:
    """A pass of the loop over random memory."""

    def __init__(
        self,
        asked: Sequence[tuple[int, int, object]],
        dtype: torch.dtype = torch.float32,
        shape: tuple[int, int, int] = (8, 2, 64),
        cached: torch.dtype | None = None,
    ) -> None:
        heads, kv_heads, dim = shape
        size = 140
        self.spans = spans_of(asked, size)
        slots = len(asked) * -(-size // PAGE_SIZE) * PAGE_SIZE
        rows = random(2, slots, kv_heads, dim)
        self.keys, self.values = (stored(each, cached or dtype) for each in rows)
        self.q = random(self.spans[-1].rows.stop, heads, dim, seed=1).to(dtype)
        dense = DenseAttention([self.keys], [self.values], heads, dtype=dtype)
        self.backend = CompiledAttention(dense)

    def run(self, sinks: Tensor | None = None) -> Tensor:
        return attend(self.backend, self.spans, self.q, 0, sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cached", CACHES, ids=str)
def test_instruction_sets_give_the_same_bits(
    dtype: torch.dtype, cached: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for loop in filter(has_isa, ATTENTION_LOOPS):
        monkeypatch.setattr(compiled, "find_attention_loop", lambda loop=loop: loop)
        found.append(Pass(MIXED, dtype, (9, 3, 80), cached).run(random(9, seed=3)))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    own = Pass([(60, 4, "causal"), (9, 2, "full")], dtype)
    before = own.run()
    own.q[1, 3, 7] = torch.nan
    after = own.run()
    assert after[1, 3].isnan().all()
    after[1, 3] = before[1, 3]
    assert torch.equal(before, after)


def test_large_scores_stay_finite() -> None:
    own = Pass(MIXED)
    own.q *= 300
    dense = DenseAttention([own.keys.double()], [own.values.double()], 8)
    wanted = attend(dense, own.spans, own.q.double())
    torch.testing.assert_close(own.run().double(), wanted, atol=5e-4, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cached", CACHES, ids=str)
def test_a_row_is_batch_invariant(
    dtype: torch.dtype, cached: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "thread_count", lambda work: 3)
    own = Pass([*MIXED, (0, 40, "causal")], dtype, (14, 2, 64), cached)
    whole = own.run()
    for span in own.spans:
        parts = span.start, span.num_visible, span.visible_ends, span.pages, span.tree
        alone = RowSpan(slice(0, len(span)), *parts)
        assert torch.equal(attend(own.backend, [alone], own.q[span.rows]), whole[span.rows])
    last = own.spans[-1]
    for row in range(40):
        alone = RowSpan(slice(0, 1), row, row + 1, None, last.pages)
        at = slice(last.rows.start + row, last.rows.start + row + 1)
        assert torch.equal(attend(own.backend, [alone], own.q[at]), whole[at])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cached", CACHES, ids=str)
@pytest.mark.parametrize("root", [60, 64, 79])
def test_a_branch_has_the_bits_of_a_text(
    dtype: torch.dtype, cached: torch.dtype, root: int
) -> None:
    parents, branch = [-1, -1, 0, 0, 1, *[2] * 12, 16, 17, 3], [0, 2, 16, 17, 18]
    text, tree = (root, len(branch), "causal"), (root, 20, Tree.from_parents(root, parents))
    own = Pass([text, tree], dtype, (14, 2, 64), cached)
    first, second = own.spans
    mine, other = (torch.from_numpy(span.pages.slots[:100]) for span in own.spans)
    places = torch.tensor(branch)
    for memory in (own.keys, own.values):
        slots = torch.arange(len(memory))
        memory[slots[other][:root]] = memory[slots[mine][:root]]
        memory[slots[other][root + places]] = memory[slots[mine][root : root + len(branch)]]
    own.q[second.rows][places] = own.q[first.rows]
    found = own.run()
    assert torch.equal(found[second.rows][places], found[first.rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_invisible_slots_may_be_anything(value: float) -> None:
    own = Pass([(60, 1, "causal"), (3, 4, 40), (0, 5, (2, 3))])
    before = own.run()
    for memory in (own.keys, own.values):
        for span in own.spans:
            slots = torch.arange(len(memory))[torch.from_numpy(span.pages.slots[:140])]
            memory[slots[span.num_visible :]] = value
    assert torch.equal(own.run(), before)


def test_later_values_may_be_anything() -> None:
    own = Pass([(0, 120, "causal")], shape=(14, 2, 64))
    before, slots = own.run(), own.spans[0].pages.slots
    own.values[int(slots[70])] = torch.nan
    after = own.run()
    assert torch.equal(after[:70], before[:70]) and after[70:].isnan().all()


def test_unsupported_tensors_are_refused() -> None:
    own = Pass([(9, 2, "full")])
    for name, q, sinks in (
        ("q", own.q[:1], None),
        ("q", own.q[:, :6], None),
        ("q", own.q[..., :32], None),
        ("q", own.q.bfloat16(), None),
        ("q", own.q.to("meta"), None),
        ("sinks", own.q, torch.ones(7)),
        ("sinks", own.q, torch.ones(8, 1)),
        ("sinks", own.q, torch.ones(8, device="meta")),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            attend(own.backend, own.spans, q, 0, sinks)
    sinks, turned = torch.randn(16)[::2], own.q.transpose(0, 1).contiguous().transpose(0, 1)
    found = attend(own.backend, own.spans, turned, 0, sinks)
    assert torch.equal(found, own.run(sinks.clone()))
    keys = torch.zeros(32, 2, 64)
    for other in (keys.bfloat16(), keys[:16], keys.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(ValueError, match="keys"):
            CompiledAttention(DenseAttention([keys, other], [keys, keys], 4))
