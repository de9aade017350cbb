"""Compare the compiled loop and the Triton kernel, interpreted, with the reference back end."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import finish, tokens
from outpace import LLM
from outpace.attention import choice, compiled, paged
from outpace.attention.batch import AttentionBatch, Backend
from outpace.attention.bounds import latest_bits, page_tables, row_bounds
from outpace.attention.by_shape import ShapedAttention, backend_by_shape
from outpace.attention.cached import read_rows
from outpace.attention.choice import BACKEND_NAMES, select_backend
from outpace.attention.compiled import CompiledAttention, compiled_unfit_reason
from outpace.attention.dense import DenseAttention
from outpace.attention.paged import PagedAttention, RowMerges, WorkGrid, WorkItems
from outpace.decoding import Sampling
from outpace.decoding.tree import Tree
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.engine import Engine
from outpace.engine.runner import Runner
from outpace.errors import OptionError
from outpace.kernels import loader
from outpace.methods import Autoregressive, Eagle, Method
from outpace.models.config import AttentionWindow
from refusal import refuses
from spans import AHEAD, FAR, TREE, attend, random, spans_of, stored
from workload import KINDS, MODELS, Request

MISSING = compiled_unfit_reason(torch.empty(16, 1, 16), PAGE_SIZE, torch.float32)
needs_loop = pytest.mark.skipif(
    MISSING is not None, reason="no compiled loop: apt-get install gcc, and reinstall outpace"
)
NAMES = [pytest.param("compiled", marks=needs_loop), "triton"]
DTYPES = [torch.float32, torch.bfloat16]
PUBLISHED = [(8, 2, 64), (14, 2, 64), (28, 4, 128), (32, 8, 128), (20, 1, 256)]
TOLERANCE = {
    ("dense", torch.float32): {"atol": 2e-6, "rtol": 0.0},
    ("compiled", torch.float32): {"atol": 4e-6, "rtol": 0.0},
    ("compiled", torch.bfloat16): {"atol": 2e-6, "rtol": 2**-8},
    ("triton", torch.float32): {"atol": 1e-5, "rtol": 0.0},
    ("triton", torch.float16): {"atol": 2e-3, "rtol": 0.0},
    ("triton", torch.bfloat16): {"atol": 1.6e-2, "rtol": 0.0},
}
"""Differences of outputs near 1: rounding of the output, and for Triton of the weights."""

PLAIN = [(60, 1, "causal"), (9, 16, "full"), (0, 5, (2, 3)), (3, 4, 40), (130, 3, "causal")]
TREES = [(68, 10, TREE), (83, 3, FAR), (97, 11, AHEAD)]
# In the last tree each row sees all before it: the longest mask.
DEEP = [(20, 64, Tree(20, tuple(2 ** min(row, 63) - 1 for row in range(64)))), PLAIN[0]]


def compare(
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    asked: Sequence[tuple[int, int, object]],
    size: int = 144,
    *,
    windows: Sequence[AttentionWindow] = (),
    sinks: Tensor | None = None,
    cached: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Compare a back end with the reference in float64 over the same memory."""
    heads, kv_heads, dim = shape
    spans = spans_of(asked, size)
    slots = len(asked) * -(-size // PAGE_SIZE) * PAGE_SIZE
    keys, values = (stored(each, cached or dtype) for each in random(2, slots, kv_heads, dim))
    every = torch.arange(slots)
    rows = spans[-1].rows.stop
    # A view of the fused query, key and value projection, as in a model.
    q = random(rows, heads + 2 * kv_heads, dim, seed=1).to(dtype)[:, :heads]
    dense = DenseAttention([keys] * 2, [values] * 2, heads, windows, dtype=dtype)
    wide = ([read_rows(each, every, torch.float64)] * 2 for each in (keys, values))
    exact = DenseAttention(*wide, heads, windows)
    options = {"page": PAGE_SIZE, "processors": 4, **options}
    ours: Backend = dense
    if name != "dense":
        ours = CompiledAttention(dense) if name == "compiled" else PagedAttention(dense, **options)
        assert ours.plan_arrays(spans)
    for layer in range(2 if windows else 1):
        own = None if sinks is None else sinks.double()
        wanted = attend(exact, spans, q.double(), layer, own)
        got = attend(ours, spans, q, layer, sinks)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, **TOLERANCE[name, dtype])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("asked", [PLAIN, [*PLAIN, *TREES]], ids=["plain", "trees"])
def test_small_heads_equal_dense(name: str, dtype: torch.dtype, asked: list) -> None:
    compare(name, (6, 2, 32), dtype, asked)


@pytest.mark.parametrize("name", [*NAMES, "dense"])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_queries_attend_over_narrower_keys(name: str, cached: torch.dtype) -> None:
    compare(name, (6, 2, 32), torch.float32, [*PLAIN, *TREES], cached=cached)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("asked", [PLAIN, [*PLAIN, *TREES], DEEP], ids=["plain", "trees", "deep"])
def test_published_heads_equal_dense(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, asked: list
) -> None:
    if (name, dtype) not in TOLERANCE:
        pytest.skip("the loop does not support float16")
    compare(name, shape, dtype, asked)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        *(("triton", 24), ("triton", 80)),
        *(pytest.param("compiled", dim, marks=needs_loop) for dim in range(16, 257, 16)),
    ],
)
def test_heads_of_any_size(name: str, dim: int) -> None:
    compare(name, (3, 1, dim), torch.float32, PLAIN[:3])


@pytest.mark.parametrize(
    "rows", [1, 2, 17, *(pytest.param(n, marks=pytest.mark.nightly) for n in (7, 16, 33, 64))]
)
@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_rows_and_threads(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = (rows,) if rows < 3 else (1, rows - 2, 1)
    asked = [(0, rows, "causal"), (50, rows, "full"), (37, rows, blocks), (90, rows, "causal")]
    for threads in (1, 3, 32) if name == "compiled" else (1,):
        monkeypatch.setattr(compiled, "thread_count", lambda work, threads=threads: threads)
        compare(name, (4, 2, 16), torch.float32, asked, 160)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "window",
    [AttentionWindow(window=n, causal=n % 2 == 1) for n in (1, 8, 71, 1000)],
    ids=lambda window: str(window.window),
)
@pytest.mark.parametrize("trees", [False, True])
def test_layers_follow_their_windows(name: str, window: AttentionWindow, trees: bool) -> None:
    asked = [*PLAIN, *TREES] if trees else PLAIN
    compare(name, (4, 2, 16), torch.float32, asked, windows=[window, AttentionWindow()])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_take_part_of_the_weight(name: str, dtype: torch.dtype) -> None:
    sinks = torch.tensor([-9.0, 0, 1, 2, 3, 8, 80, -torch.inf]).to(dtype)
    windows = [AttentionWindow(window=70), AttentionWindow()]
    asked = [TREES[0], PLAIN[2], PLAIN[4]]
    compare(name, (8, 2, 32), dtype, asked, windows=windows, sinks=sinks)


@pytest.mark.nightly
@pytest.mark.parametrize("processors", [1, 64])
@pytest.mark.parametrize("pad_work", [False, True])
def test_split_and_padded_work_changes_nothing(processors: int, pad_work: bool) -> None:
    asked = [
        (0, 3, Tree.from_parents(0, [-1, 0, 0])),
        (250, 9, Tree.from_parents(251, [-1, 0, 1, 2, 0, 4, -1, 6])),
        (300, 2, Tree(240, (1 << 59 | 1, 1 << 60))),
        (30, 4, "full"),
        (500, 1, "causal"),
    ]
    windows = [AttentionWindow(window=140), AttentionWindow()]
    sinks = torch.tensor([0.0, 3.0, -2.0])
    compare(
        *("triton", (3, 1, 16), torch.float32, asked, 512),
        windows=windows,
        sinks=sinks,
        processors=processors,
        pad_work=pad_work,
    )
    dense = DenseAttention([random(2560, 2, 16)] * 2, [random(2560, 2, 16)] * 2, 4, windows)
    ours = PagedAttention(dense, page=PAGE_SIZE, processors=processors, pad_work=pad_work)
    _, *rest = ours.plan_arrays(spans_of(asked[3:], 512))
    items, merges = [len(n) // 8 for n in rest[1::3]], [len(n) // 4 for n in rest[2::3]]
    if pad_work:
        assert all(n.bit_count() == 1 for n in items) and all(n.bit_count() <= 1 for n in merges)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, -3, 50, -torch.inf])])
def test_a_row_without_keys_gives_zero(sinks: Tensor | None) -> None:
    alone, beside = spans_of([(3, 2, 0), (500, 3, "causal")], 512)
    beside.visible_ends = [0, 502, 0]
    dense = DenseAttention([random(1024, 2, 16)], [random(1024, 2, 16)], 4)
    ours = PagedAttention(dense, page=PAGE_SIZE, processors=64)
    found = attend(ours, [alone, beside], random(5, 4, 16), sinks=sinks)
    assert not found[[0, 1, 2, 4]].any() and not found.isnan().any()
    assert found[3, :2].all()


@pytest.mark.parametrize(
    ("window", "split"), [(AttentionWindow(window=50), False), (AttentionWindow(), True)]
)
@pytest.mark.parametrize("trees", [False, True])
def test_every_slot_is_read_once(window: AttentionWindow, split: bool, trees: bool) -> None:
    spans = spans_of([*PLAIN, *TREES] if trees else PLAIN, 144)
    grid = WorkGrid(rows=4, step=32, page=PAGE_SIZE, programs=64, kv_heads=2)
    seen = row_bounds(spans, window)
    tiles = grid.tile_rows(spans, page_tables(spans, PAGE_SIZE)[1], seen)
    items, merges = ([*zip(*each, strict=True)] for each in grid.split_tiles(tiles))
    low, stop, *_ = seen
    last = np.maximum(stop, seen[4] + 1) if trees else stop
    for row in range(len(stop)):
        own = [i for i in map(WorkItems._make, items) if 0 <= row - i.first_row < i.num_rows]
        assert own[0].begin <= low[row] and own[-1].end >= last[row]
        assert all(a.end == b.begin for a, b in zip(own, own[1:], strict=False))
        for each in own:
            assert each.begin <= each.full_begin <= each.full_end <= each.end
            is_masked = each.full_begin == each.full_end
            assert is_masked or (low[row] <= each.full_begin and each.full_end <= stop[row])
        first_part = own[0].part + row - own[0].first_row
        wanted = [RowMerges(row, first_part, grid.rows, len(own))] if own[1:] else []
        assert [merge for merge in merges if merge[0] == row] == wanted
    assert {WorkItems(*item).part < 0 for item in items} == {True, not split}
    assert [latest_bits(0b10110, count) for count in range(4)] == [0, 0b10000, 0b10100, 0b10110]


HEADS, SIZE = 8, 96
SHAPES = [(2, 64), (4, 32), (2, 64)]
WINDOWS = [AttentionWindow(window=9, causal=True), AttentionWindow(), AttentionWindow()]


@pytest.mark.parametrize("name", BACKEND_NAMES[1:])
@pytest.mark.parametrize("pattern", ["causal", TREE])
def test_layers_of_two_shapes_attend_as_each_alone(name: str, pattern: object) -> None:
    asked = [(60, 1, "causal"), (9, 16, "causal"), (3, 4, "causal"), (70, 8, pattern)]
    spans = spans_of(asked, SIZE)
    memory = [
        random(2, heads, len(asked) * SIZE, size, seed=layer).transpose(1, 2)
        for layer, (heads, size) in enumerate(SHAPES)
    ]
    keys, values = ([each[part] for each in memory] for part in (0, 1))

    def select(keys: Any, values: Any, windows: Any) -> Any:
        form: dict[str, Any] = {"dtype": torch.float32, "double": False}
        return select_backend(name, keys, values, HEADS, windows, page=PAGE_SIZE, **form)

    try:
        ours = backend_by_shape(keys, values, WINDOWS, select)
    except OptionError as error:
        pytest.skip(str(error))
    assert isinstance(ours, ShapedAttention)
    rows = spans[-1].rows.stop
    write = torch.from_numpy(spans[0].pages.slots[:rows])
    numbers = [torch.from_numpy(each) for each in ours.plan_arrays(spans)]
    assert len(numbers) in (0, ours.num_arrays)
    none = torch.zeros(0, dtype=torch.int64)
    run = ours.plan_pass(AttentionBatch(none, none, write, None, spans, plan_arrays=numbers))
    for layer, (_, size) in enumerate(SHAPES):
        q = random(rows, HEADS, size, seed=7)
        nothing = q.new_zeros(rows, 0, size)
        before = keys[layer].clone(), values[layer].clone()
        got = run(layer, q, nothing, nothing)
        assert torch.equal(keys[layer], before[0]) and torch.equal(values[layer], before[1])
        exact = DenseAttention([keys[layer]], [values[layer]], HEADS, [WINDOWS[layer]])
        batch = AttentionBatch(none, none, write, None, spans)
        wanted = exact.plan_pass(batch)(0, q, nothing, nothing)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def choose(
    name: Any,
    dtype: torch.dtype = torch.float32,
    dim: int = 64,
    page: int = PAGE_SIZE,
    double: bool = False,
) -> Any:
    """Create a back end over a small cache."""
    keys = [torch.zeros(64, 2, dim, dtype=dtype)]
    return select_backend(name, keys, keys, 4, (), page=page, dtype=dtype, double=double)


def test_a_device_without_a_figure_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    keys = [torch.zeros(64, 2, 16, device="meta")]
    choice.warn_unproven_device.cache_clear()
    for _ in range(2):
        choose("dense")
        form: dict[str, Any] = {"dtype": torch.float32, "double": False}
        select_backend("dense", keys, keys, 4, (), page=PAGE_SIZE, **form)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@needs_loop
def test_auto_prefers_the_loop_where_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "outpace")
    assert isinstance(choose("auto"), CompiledAttention)
    assert isinstance(choose("compiled"), CompiledAttention)
    assert isinstance(choose("dense"), DenseAttention)
    assert isinstance(choose("triton"), PagedAttention)
    for given in ({"dtype": torch.float16}, {"dim": 24}, {"dim": 272}, {"page": 32}):
        caplog.clear()
        assert isinstance(choose("auto", **given), DenseAttention)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        with refuses("attention"):
            choose("compiled", **given)
    with refuses("attention"):
        choice.check_backend("compiled", torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flash", {}),
        (None, {}),
        (["triton"], {}),
        ("triton", {"dtype": torch.float64}),
        ("triton", {"double": True}),
        ("triton", {"dim": 512}),
    ],
)
def test_unavailable_back_ends_are_refused(name: Any, options: dict[str, Any]) -> None:
    with refuses("attention"):
        choose(name, **options)


def test_without_triton_or_a_gpu_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "is_interpreted", False)
    with refuses("attention"):
        LLM("tiny-ar", attention="triton")
    monkeypatch.setattr(paged, "is_interpreted", True)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with refuses("attention"):
        choose("triton")
    assert not isinstance(choose("auto"), PagedAttention)


def test_without_a_compiler_dense_attends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    loader.load_library.cache_clear()
    try:
        assert isinstance(choose("auto"), DenseAttention)
        choose("auto")
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        with refuses("attention"):
            choose("compiled")
    finally:
        loader.load_library.cache_clear()


@pytest.mark.nightly
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    program = Path(__file__).parent / "compiled.py"
    aside = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=os.environ | aside
    )
    assert done.returncode == 0, done.stderr
    names, shared = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
    without_sinks = "merge", "attend", "attend"
    assert names == ("read", "verify", *without_sinks, *without_sinks)
    assert all(int(size) < 100_000 for size in shared)


def decode(method: Method, attention: str, temperature: float) -> list[list[int]]:
    """Return the tokens of two requests by a back end."""
    engine, sampling = Engine(), Sampling(temperature=temperature, seed=3)
    for role, model in MODELS.items():
        engine.add_runner(Runner(role, model, slots=32 * PAGE_SIZE, attention=attention))
    prompts = ((3, 1, 4, 1, 5), tuple(range(1, 20)))
    asked = [Request(method=method, prompt=p, max_tokens=12, sampling=sampling) for p in prompts]
    jobs = [each.submit(engine) for each in asked]
    finish(engine)
    return [tokens(job) for job in jobs]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method == Autoregressive() else pytest.mark.nightly)
        for method in KINDS
    ],
    ids=lambda method: type(method).__name__,
)
def test_every_method_generates_the_text_of_dense(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_trees = isinstance(method, Eagle) and method.width
    for temperature in (0.0, 1.0) if has_trees else (0.0,):
        monkeypatch.undo()
        wanted = decode(method, "dense", temperature)
        monkeypatch.setattr(DenseAttention, "plan_pass", None)
        assert decode(method, "triton", temperature) == wanted
