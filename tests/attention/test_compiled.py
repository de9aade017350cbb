"""Compare the compiled loop with the reference back end, and a row alone with a row in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import make_dataclass

import pytest
import torch
from torch import Tensor

from outpace import LLM
from outpace.attention import choice
from outpace.attention.batch import RowSpan
from outpace.attention.choice import select_backend
from outpace.attention.compiled import ATTENTION_LOOPS, CompiledAttention, compiled_unfit_reason
from outpace.attention.dense import DenseAttention
from outpace.decoding.tree import Tree
from outpace.engine.cache import PAGE_SIZE
from outpace.kernels import loader
from outpace.kernels.loader import has_isa
from outpace.models.config import AttentionWindow
from spans import AHEAD, FAR, TREE, attend, random, spans_of

MISSING = compiled_unfit_reason(torch.empty(16, 1, 16), (), PAGE_SIZE)
needs_loop = pytest.mark.skipif(MISSING is not None, reason=f"no compiled attention: {MISSING}")
SHAPES = [(8, 2, 64), (14, 2, 64), (28, 4, 128), (32, 8, 128), (6, 6, 32), (20, 1, 256), (4, 4, 16)]
DTYPES = [torch.float32, torch.bfloat16]
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


class Side:
    """Both back ends over the same memory; the reference attends in float64."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        asked: Sequence[tuple[int, int, object]],
        size: int,
        sights: Sequence[AttentionWindow] = (),
    ) -> None:
        heads, kv_heads, dim = shape
        self.spans = spans_of(asked, size)
        slots = len(asked) * -(-size // PAGE_SIZE) * PAGE_SIZE
        memory = random(2, kv_heads, slots, dim).to(dtype).transpose(1, 2)
        rows = self.spans[-1].rows.stop
        # A view of the fused query, key and value projection, as in a model.
        self.q = random(rows, heads + 2 * kv_heads, dim, seed=1).to(dtype)[:, :heads]
        dense = DenseAttention([memory[0]] * 2, [memory[1]] * 2, heads, sights)
        self.exact = DenseAttention(
            [memory[0].double()] * 2, [memory[1].double()] * 2, heads, sights
        )
        self.ours = CompiledAttention(dense)

    def compare(self, layer: int = 0, sinks: Tensor | None = None, within: float = 2e-6) -> None:
        """Assert that they agree within the rounding of the dtype."""
        own = None if sinks is None else sinks.double()
        wanted = attend(self.exact, self.spans, self.q.double(), layer, own)
        got = attend(self.ours, self.spans, self.q, layer, sinks)
        assert got.dtype == self.q.dtype
        bound = 2**-8 if got.dtype == torch.bfloat16 else 0
        torch.testing.assert_close(got.double(), wanted, atol=within, rtol=bound)


@needs_loop
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loop_equals_dense(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    Side(shape, dtype, MIXED, 140).compare()


@needs_loop
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets_give_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for loop in filter(has_isa, ATTENTION_LOOPS):
        monkeypatch.setattr(
            "outpace.attention.compiled.find_attention_loop", lambda loop=loop: loop
        )
        side = Side((9, 3, 80), dtype, MIXED, 140)
        found.append(attend(side.ours, side.spans, side.q, 0, random(9, seed=3)))
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_loop
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("threads", [1, 3, 32])
def test_for_any_number_of_rows_and_threads(
    rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.attention.compiled.thread_count", lambda work: threads)
    for start in (0, 5, 300):
        Side((14, 2, 64), torch.float32, [(start, rows, "causal")], start + rows).compare()


@needs_loop
@pytest.mark.parametrize("window, causal", [(1, True), (3, False), (70, True), (1000, False)])
@pytest.mark.parametrize("trees", [True, False])
def test_layers_follow_their_windows(window: int, causal: bool, trees: bool) -> None:
    asked = [each for each in MIXED if trees or not isinstance(each[2], Tree)]
    side = Side(
        (8, 2, 64),
        torch.float32,
        asked,
        140,
        [AttentionWindow(), AttentionWindow(window=window, causal=causal)],
    )
    for layer in range(2):
        side.compare(layer)


@needs_loop
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_take_part_of_the_weight(dtype: torch.dtype) -> None:
    sinks = torch.tensor([-9.0, 0, 1, 2, 3, 8, 20, 80]).to(dtype)
    Side((8, 2, 64), dtype, MIXED, 140).compare(sinks=sinks)


@needs_loop
def test_large_scores_stay_finite() -> None:
    side = Side((8, 2, 64), torch.float32, MIXED, 140)
    side.q = side.q * 300
    side.compare(within=5e-4)


@needs_loop
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    side = Side((8, 2, 64), dtype, [(60, 4, "causal"), (9, 2, "full")], 80)
    before = attend(side.ours, side.spans, side.q)
    side.q[1, 3, 7] = torch.nan
    after = attend(side.ours, side.spans, side.q)
    assert after[1, 3].isnan().all()
    after[1, 3] = before[1, 3]
    assert torch.equal(before, after)


@needs_loop
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_batch_invariant(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.attention.compiled.thread_count", lambda work: 3)
    side = Side((14, 2, 64), dtype, [*MIXED, (0, 40, "causal")], 140)
    whole = attend(side.ours, side.spans, side.q)
    for span in side.spans:
        own = RowSpan(
            slice(0, len(span)),
            span.start,
            span.num_visible,
            span.visible_ends,
            span.pages,
            span.tree,
        )
        assert torch.equal(attend(side.ours, [own], side.q[span.rows]), whole[span.rows])
    last = side.spans[-1]
    for row in range(40):
        own = RowSpan(slice(0, 1), row, row + 1, None, last.pages)
        at = last.rows.start + row
        assert torch.equal(attend(side.ours, [own], side.q[at : at + 1]), whole[at : at + 1])


@needs_loop
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("root", [60, 64, 79])
def test_a_branch_has_the_bits_of_a_text(dtype: torch.dtype, root: int) -> None:
    parents, branch = [-1, -1, 0, 0, 1, *[2] * 12, 16, 17, 3], [0, 2, 16, 17, 18]
    text, tree = (root, len(branch), "causal"), (root, 20, Tree.from_parents(root, parents))
    side = Side((14, 2, 64), dtype, [text, tree], 100)
    first, second = side.spans
    own, other = (span.pages.physical_slots(100) for span in side.spans)
    places = torch.tensor(branch)
    for memory in (side.ours.keys[0], side.ours.values[0]):
        slots = torch.arange(len(memory))
        memory[slots[other][:root]] = memory[slots[own][:root]]
        memory[slots[other][root + places]] = memory[slots[own][root : root + len(branch)]]
    side.q[second.rows][places] = side.q[first.rows]
    found = attend(side.ours, side.spans, side.q)
    assert torch.equal(found[second.rows][places], found[first.rows])


@needs_loop
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_invisible_slots_may_be_anything(value: float) -> None:
    asked = [(60, 1, "causal"), (3, 4, 40), (0, 5, (2, 3))]
    side = Side((8, 2, 64), torch.float32, asked, 70)
    before = attend(side.ours, side.spans, side.q)
    for memory in (side.ours.keys[0], side.ours.values[0]):
        for span in side.spans:
            own = torch.arange(len(memory))[span.pages.physical_slots(70)]
            memory[own[span.num_visible :]] = value
    assert torch.equal(attend(side.ours, side.spans, side.q), before)


@needs_loop
def test_unsupported_tensors_are_refused() -> None:
    side = Side((8, 2, 64), torch.float32, [(9, 2, "full")], 80)
    for name, q, sinks in (
        ("q", side.q[:1], None),
        ("q", side.q[:, :6], None),
        ("q", side.q[..., :32], None),
        ("q", side.q.bfloat16(), None),
        ("q", side.q.to("meta"), None),
        ("sinks", side.q, torch.ones(7)),
        ("sinks", side.q, torch.ones(8, 1)),
        ("sinks", side.q, torch.ones(8, device="meta")),
    ):
        with pytest.raises(ValueError, match=f"^{name}(:| must be) "):
            attend(side.ours, side.spans, q, 0, sinks)
    sinks = torch.randn(16)[::2]
    found = attend(
        side.ours, side.spans, side.q.transpose(0, 1).contiguous().transpose(0, 1), 0, sinks
    )
    assert torch.equal(found, attend(side.ours, side.spans, side.q.clone(), 0, sinks.clone()))
    keys = torch.zeros(32, 2, 64)
    for other in (keys.bfloat16(), keys[:16], keys.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(ValueError, match="one shape, layout and dtype"):
            CompiledAttention(DenseAttention([keys, other], [keys, keys], 4))


def choose(name: str, dtype: torch.dtype = torch.float32, dim: int = 64, page: int = PAGE_SIZE):
    """Create a back end over a small cache."""
    keys = [torch.zeros(64, 2, dim, dtype=dtype)]
    return select_backend(name, keys, keys, 4, (), page=page, double=False)


@needs_loop
def test_auto_prefers_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "outpace"):
        assert isinstance(choose("auto"), CompiledAttention) and isinstance(
            choose("compiled"), CompiledAttention
        )
        assert isinstance(choose("dense"), DenseAttention)
        for given, why in (
            ({"dtype": torch.float16}, "it supports float32 and bfloat16, got torch.float16"),
            ({"dim": 24}, "the head size must be a multiple of 16 up to 256, got 24"),
            ({"dim": 272}, "the head size must be a multiple of 16 up to 256, got 272"),
            ({"page": 32}, "pages must have 16 slots, got 32"),
        ):
            assert isinstance(choose("auto", **given), DenseAttention)
            assert f"dense instead of compiled because {why}" in caplog.messages[-1]
            with pytest.raises(
                ValueError, match="attention='compiled' is not available here: .*'dense' or"
            ):
                choose("compiled", **given)
    with pytest.raises(ValueError, match="it requires a CPU, got cuda; use 'dense' or"):
        choice.check_backend("compiled", torch.device("cuda"))


def test_without_a_compiler_it_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    loader.load_library.cache_clear()
    try:
        assert isinstance(choose("auto"), DenseAttention)
        choose("auto")
        assert [r.message for r in caplog.records if "without a C compiler" in r.message]
        assert len(caplog.records) == 1 and "install gcc" in caplog.text
        with pytest.raises(
            ValueError, match="it was not compiled during the installation of outpace"
        ):
            LLM("tiny-ar", attention="compiled")
    finally:
        loader.load_library.cache_clear()


@needs_loop
def test_unsupported_windows_use_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    later = make_dataclass("Sight", [("dilation", int, 1)], bases=(AttentionWindow,), frozen=True)
    monkeypatch.setattr("outpace.attention.compiled.AttentionWindow", later)
    keys = torch.empty(16, 1, 16)
    assert compiled_unfit_reason(keys, [later(window=3)], PAGE_SIZE) is None
    assert "the dilation of a layer's attention window" in str(
        compiled_unfit_reason(keys, [later(dilation=2)], PAGE_SIZE)
    )
