"""Compare the kernel with the reference back end, under Triton's interpreter."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import finish, tokens
from outpace import LLM
from outpace.attention import choice, paged
from outpace.attention.batch import Backend, RowSpan
from outpace.attention.choice import select_backend
from outpace.attention.dense import DenseAttention
from outpace.attention.paged import PagedAttention
from outpace.attention.plan import RowTiles, WorkGrid, latest_bits, page_tables, row_bounds
from outpace.decoding import Sampling
from outpace.decoding.tree import Tree
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.engine import Engine
from outpace.engine.runner import Runner
from outpace.evaluation.run import questions_of
from outpace.methods import APD, Autoregressive, DFlash, Eagle, Method
from outpace.models.config import AttentionWindow
from spans import AHEAD, FAR, TREE, attend, random, spans_of
from workload import KINDS, MODELS, Request

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference of outputs near 1; the eps of the 16-bit dtypes is 1e-3 and 8e-3."""


def compare(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    asked: Sequence[tuple[int, int, object]],
    size: int,
    *,
    processors: int = 4,
    sights: Sequence[AttentionWindow] = (),
    filled: bool = False,
    sinks: Tensor | None = None,
) -> None:
    """Compare both back ends on the same memory; the reference attends in float32."""
    heads, kv_heads, dim = shape
    spans = spans_of(asked, size)
    slots = len(asked) * -(-size // PAGE_SIZE) * PAGE_SIZE
    memory = random(2, kv_heads, slots, dim).to(dtype).transpose(1, 2)
    rows = spans[-1].rows.stop
    # A view of the fused query, key and value projection, as in a model.
    q = random(rows, heads + 2 * kv_heads, dim, seed=1).to(dtype)[:, :heads]
    dense = DenseAttention([memory[0]] * 2, [memory[1]] * 2, heads, sights)
    exact = DenseAttention([memory[0].float()] * 2, [memory[1].float()] * 2, heads, sights)
    ours = PagedAttention(dense, page=PAGE_SIZE, processors=processors, pad_work=filled)
    assert ours.plan_arrays(spans)
    for layer in range(2 if sights else 1):
        wanted = attend(exact, spans, q.float(), layer, sinks)
        got = attend(ours, spans, q, layer, sinks)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), wanted, atol=TOLERANCE[dtype], rtol=0)


SHAPES = [(8, 2, 64), (14, 2, 64), (28, 4, 128), (32, 8, 128)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIXED = [(60, 1, "causal"), (9, 16, "full"), (0, 5, (2, 3)), (3, 4, 40), (130, 3, "causal")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_equals_dense(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    compare(shape, dtype, MIXED if shape[0] < 32 else [*MIXED[:2], MIXED[4]], 144)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tree_rows_follow_their_masks(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    compare(shape, dtype, [(68, 10, TREE), MIXED[4], (83, 3, FAR), (97, 11, AHEAD), MIXED[2]], 144)


@pytest.mark.parametrize("processors", [1, 64])
@pytest.mark.parametrize("filled", [False, True])
def test_trees_may_be_split(processors: int, filled: bool) -> None:
    asked = [
        (0, 3, Tree.from_parents(0, [-1, 0, 0])),
        (250, 9, Tree.from_parents(251, [-1, 0, 1, 2, 0, 4, -1, 6])),
        (300, 2, Tree(240, (1 << 59 | 1, 1 << 60))),
        (500, 1, "causal"),
    ]
    sights = [AttentionWindow(window=140), AttentionWindow()]
    compare(
        (4, 2, 16), torch.float32, asked, 512, processors=processors, sights=sights, filled=filled
    )


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_take_part_of_the_weight(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    sinks = torch.tensor([-9.0, 0, 1, 2, 3, 8, 80, -torch.inf]).repeat(4)[: shape[0]].to(dtype)
    sights = [AttentionWindow(window=70), AttentionWindow()]
    compare(shape, dtype, [(68, 10, TREE), MIXED[2], MIXED[4]], 144, sights=sights, sinks=sinks)


@pytest.mark.parametrize("processors", [1, 64])
@pytest.mark.parametrize("filled", [False, True])
def test_sinks_count_once_where_keys_are_split(processors: int, filled: bool) -> None:
    sinks = torch.tensor([0.0, 3.0, -2.0]).bfloat16()
    asked = [
        (500, 2, "causal"),
        (30, 4, "full"),
        (250, 9, Tree.from_parents(251, [-1, 0, 1, 2, 0, 4, -1, 6])),
    ]
    compare(
        *((3, 1, 16), torch.float32, asked, 512),
        processors=processors,
        filled=filled,
        sinks=sinks,
    )


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, -3, 50, -torch.inf])])
def test_a_row_without_keys_gives_zero(sinks: Tensor | None) -> None:
    alone, beside = spans_of([(3, 2, 0), (500, 3, "causal")], 512)
    beside.visible_ends = [0, 502, 0]
    dense = DenseAttention([random(1024, 2, 16)], [random(1024, 2, 16)], 4)
    found = attend(
        PagedAttention(dense, page=PAGE_SIZE, processors=64),
        [alone, beside],
        random(5, 4, 16),
        sinks=sinks,
    )
    assert not found[[0, 1, 2, 4]].any() and not found.isnan().any()
    assert found[3, :2].all()


@pytest.mark.parametrize("rows", [1, 2, 7, 17, 33, 64])
def test_kernel_equals_dense_for_any_number_of_rows(rows: int) -> None:
    blocks = (rows,) if rows < 3 else (1, rows - 2, 1)
    asked = [(0, rows, "causal"), (50, rows, "full"), (37, rows, blocks), (90, rows, "causal")]
    compare((4, 2, 16), torch.float32, asked, 160)


@pytest.mark.parametrize("processors", [1, 64])
def test_splitting_changes_nothing(processors: int) -> None:
    asked = [(1000, 2, "causal"), (30, 4, "full"), (500, 1, "causal")]
    compare((4, 1, 32), torch.float32, asked, 1008, processors=processors)


@pytest.mark.parametrize("processors", [1, 64])
def test_padded_work_changes_nothing(processors: int) -> None:
    asked = [(300, 3, "causal"), (30, 4, "full"), (500, 1, "causal")]
    sights = [AttentionWindow(window=70), AttentionWindow()]
    compare(
        (4, 2, 16), torch.float32, asked, 512, processors=processors, sights=sights, filled=True
    )
    dense = DenseAttention([random(1536, 2, 16)] * 2, [random(1536, 2, 16)] * 2, 4, sights)
    ours = PagedAttention(dense, page=PAGE_SIZE, processors=processors, pad_work=True)
    pages, *rest = ours.plan_arrays(spans_of(asked, 512))
    assert len(pages) == 1024 and [len(each) for each in rest[::3]] == [16, 16]
    items, merges = [len(n) // 8 for n in rest[1::3]], [len(n) // 4 for n in rest[2::3]]
    assert all(n.bit_count() == 1 for n in items) and all(n.bit_count() <= 1 for n in merges)


@pytest.mark.parametrize(("window", "causal"), [(1, True), (5, False), (70, True), (1000, False)])
@pytest.mark.parametrize("trees", [False, True])
def test_layers_follow_their_windows(window: int, causal: bool, trees: bool) -> None:
    sights = [AttentionWindow(window=window, causal=causal), AttentionWindow()]
    asked = [*MIXED, (68, 10, TREE), (83, 3, FAR), (97, 11, AHEAD)] if trees else MIXED
    compare((4, 2, 16), torch.float32, asked, 144, sights=sights)


@pytest.mark.parametrize("dim", [16, 24, 80, 96])
def test_heads_of_any_size(dim: int) -> None:
    compare((3, 1, dim), torch.float32, MIXED[:3], 144)


@pytest.mark.parametrize(
    ("sight", "split"), [(AttentionWindow(window=50), False), (AttentionWindow(), True)]
)
@pytest.mark.parametrize("trees", [False, True])
def test_every_slot_is_read_once(sight: AttentionWindow, split: bool, trees: bool) -> None:
    spans = spans_of(
        [*MIXED, (68, 10, TREE), (83, 3, FAR), (97, 11, AHEAD)] if trees else MIXED, 144
    )
    grid = WorkGrid(rows=4, step=32, page=PAGE_SIZE, programs=64, kv_heads=2)
    seen = row_bounds(spans, sight)
    tiles = RowTiles.from_spans(spans, page_tables(spans, PAGE_SIZE)[1], seen, grid)
    items, merges = tiles.work_items(grid)
    low, stop, *_ = seen
    last = np.maximum(stop, seen[4] + 1) if trees else stop
    for row in range(len(stop)):
        own = [i for i in items.tolist() if i[0] <= row < i[0] + i[1]]
        assert own[0][3] <= low[row] and own[-1][6] >= last[row]
        assert all(a[6] == b[3] for a, b in zip(own, own[1:], strict=False))
        for _, _, _, begin, clear, unclear, end, _ in own:
            assert begin <= clear <= unclear <= end
            assert clear == unclear or (low[row] <= clear and unclear <= stop[row])
        merged = merges[merges[:, 0] == row].tolist()
        assert merged == ([[row, own[0][7] + row - own[0][0], 4, len(own)]] if own[1:] else [])
    assert {part < 0 for *_, part in items.tolist()} == {True, not split}


def test_unsupported_fields_use_dense(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later = make_dataclass("Span", [("leaf", object, None)], bases=(RowSpan,))
    monkeypatch.setattr(paged, "RowSpan", later)
    own = [getattr(spans_of(MIXED[:1], 144)[0], field.name) for field in fields(RowSpan)]
    dense = DenseAttention([random(256, 2, 16)], [random(256, 2, 16)], 4)
    ours = PagedAttention(dense, page=PAGE_SIZE, processors=4)
    assert ours.plan_arrays([later(*own)])
    q = random(1, 4, 16)
    for _ in range(2):
        spans = [later(*own, leaf=[1])]
        assert torch.equal(attend(ours, spans, q), attend(dense, spans, q))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "leaf" in caplog.text


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


def choose(name: str, dtype: torch.dtype = torch.float32, **options: bool) -> Backend:
    """Create a back end for a tiny cache."""
    keys = [torch.zeros(2 * PAGE_SIZE, 2, 16, dtype=dtype)]
    return select_backend(
        name, keys, keys, 4, (), page=PAGE_SIZE, double=options.get("double", False)
    )


def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(choose("dense"), DenseAttention)
        assert isinstance(choose("triton"), PagedAttention)
    assert [record.message for record in caplog.records] == [
        "attention on cpu in float32: dense",
        "attention on cpu in float32: triton",
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("flash", {}, "attention must be one of auto, dense, compiled, triton, got 'flash'"),
        (None, {}, "attention must be one of .*, got None"),
        (["triton"], {}, r"attention must be one of .*, got \['triton'\]"),
        ("triton", {"dtype": torch.float64}, "got torch.float64; use 'dense' or 'auto'"),
        ("triton", {"double": True}, "int8 matrices require"),
    ],
)
def test_unavailable_back_ends_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(name, **options)


def test_without_triton_or_a_gpu_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "is_interpreted", False)
    with pytest.raises(ValueError, match="it requires a GPU, got cpu"):
        LLM("tiny-ar", attention="triton")
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        LLM("tiny-ar", attention="triton")
    assert not isinstance(choose("auto"), PagedAttention)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("tiny-ar", Autoregressive()),
        pytest.param("tiny-dream", APD(verifier="tiny-aux"), marks=pytest.mark.nightly),
    ],
)
def test_zoo_text_equals_dense(model: str, method: Method) -> None:
    texts = []
    for name in ("dense", "triton"):
        llm = LLM(model, method, attention=name, cache_gib=0.01)
        kinds = {type(runner.backend) for runner in llm.runners.values()}
        assert kinds == {DenseAttention if name == "dense" else PagedAttention}
        given = [question.prompt for question in questions_of("story", 2)]
        texts.append([out.text for out in llm.generate(given, max_tokens=6, temperature=0.0)])
    assert texts[0] == texts[1] and all(texts[0])


QUICK = KINDS[0], next(method for method in KINDS if isinstance(method, DFlash))


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in QUICK else [pytest.mark.nightly])
        for method in KINDS
    ],
    ids=lambda method: type(method).__name__,
)
def test_every_method_equals_dense(method: Method) -> None:
    sampling = Sampling()
    assert decoded(method, "triton", sampling) == decoded(method, "dense", sampling)


def decoded(method: Method, attention: str, sampling: Sampling) -> list[list[int]]:
    """Return the tokens of two requests by a back end."""
    engine = Engine()
    for role, model in MODELS.items():
        engine.add_runner(Runner(role, model, slots=32 * PAGE_SIZE, attention=attention))
    prompts = ((3, 1, 4, 1, 5), tuple(range(1, 20)))
    asked = [Request(method=method, prompt=p, max_tokens=12, sampling=sampling) for p in prompts]
    jobs = [each.submit(engine) for each in asked]
    finish(engine)
    return [tokens(job) for job in jobs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tree_decoding_equals_dense(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    method = next(each for each in KINDS if isinstance(each, Eagle) and each.width > 1)
    sampling = Sampling(temperature=temperature, seed=3)
    wanted = decoded(method, "dense", sampling)
    monkeypatch.setattr(DenseAttention, "plan_pass", None)
    assert decoded(method, "triton", sampling) == wanted


def test_the_latest_bits() -> None:
    assert [latest_bits(0b10110, count) for count in range(4)] == [0, 0b10000, 0b10100, 0b10110]
