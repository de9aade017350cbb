"""Recorded passes and compiled layers: the same tokens, with substitutes where there is no GPU."""

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from helpers import causal_model, finish, run, tokens
from outpace.attention.ranges import RangesAttention, causal_ranges
from outpace.checkpoints.load import load_model
from outpace.decoding import CAUSAL, Forward, Sample
from outpace.decoding.tree import Tree
from outpace.engine import graphs, runner
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.cpu import unpack_model
from outpace.engine.engine import Engine
from outpace.engine.fuse import FusedBlock, check_compilation, compile_layers
from outpace.engine.graphs import HiddenStates, make_recorder
from outpace.engine.runner import Runner
from outpace.methods import APD, Autoregressive, DFlash, Method
from outpace.models.transformer import Stack, Transformer
from refusal import refuses
from workload import KINDS, MODELS, Request

pytest.importorskip("triton")

CPU, KEPT = torch.device("cpu"), Sample(keep=True)
FEW = [next(m for m in KINDS if isinstance(m, kind)) for kind in (Autoregressive, APD, DFlash)]


class Again:
    """In place of a graph: runs the pass again over the same memory; NaN until the first replay."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], HiddenStates]) -> tuple[Callable[[], None], HiddenStates]:
        hidden, captured = run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            own, layers = run()
            hidden.copy_(own)
            for layer, states in layers.items():
                captured[layer].copy_(states)

        for states in (hidden, *captured.values()):
            states.fill_(float("nan"))
        return replay, (hidden, captured)


def engine_with(record: Again | None, only: str | None = None, compile: bool = False) -> Engine:
    """Return an engine whose models, or only one, record their passes; compiled ones are copies."""
    engine = Engine()
    for role, model in (deepcopy(MODELS) if compile else MODELS).items():
        given = {"record": record if only in (None, role) else None, "compile": compile}
        engine.add_runner(Runner(role, model, slots=32 * PAGE_SIZE, attention="triton", **given))
    return engine


def decode(method: Method, record: Again | None) -> list[list[int]]:
    """Return tokens of two concurrent requests, and of a third that arrives later."""
    engine = engine_with(record)
    prompts = ((3, 1, 4, 1, 5), tuple(range(1, 20)), (2, 7))
    requests = [Request(method=method, prompt=prompt, max_tokens=9) for prompt in prompts]
    jobs = [each.submit(engine) for each in requests[:2]]
    for _ in range(3):
        engine.step()
    jobs.append(requests[2].submit(engine))
    finish(engine)
    return [tokens(job) for job in jobs]


@pytest.mark.nightly
@pytest.mark.parametrize("method", KINDS, ids=lambda method: type(method).__name__)
def test_recorded_passes_give_the_same_tokens(method: Method) -> None:
    record = Again()
    assert decode(method, record) == decode(method, None)
    assert record.replayed >= record.recorded > 0


def test_a_shape_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Again()
    engine = engine_with(record)

    def once() -> int:
        before = record.recorded
        job = Request(method=Autoregressive(), prompt=(3, 1, 4), max_tokens=4).submit(engine)
        finish(engine)
        assert len(tokens(job)) == 4
        return record.recorded - before

    assert once() == 2 and once() == 0
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    once()  # drops the others
    assert once() == 2


def passes(model: Transformer, record: Again | None) -> list[torch.Tensor]:
    """Return logits of equally many rows: causal, as a tree, as another one, and causal again."""
    runner = Runner("a", model, slots=8 * PAGE_SIZE, attention="triton", record=record)
    found = []
    for parents in ((), (-1, -1, 0, 1), (-1, 0, 0, 0), ()):
        table = runner.reserve(PAGE_SIZE)
        assert table is not None
        tree = Tree.from_parents(1, parents)
        pattern = tree if parents else CAUSAL
        places = tree.positions(0) if parents else None
        ids = [3, 1, 4, 1, 5]
        forward = Forward(ids=ids, start=0, pattern=pattern, positions=places, read=KEPT)
        (prediction,) = run(runner, [forward], [table])
        assert prediction.logits is not None
        found.append(prediction.logits[0])
    return found


def test_tree_passes_have_separate_graphs() -> None:
    record, model = Again(), MODELS["causal"]
    found = passes(model, record)
    torch.testing.assert_close(found, passes(model, None))
    assert record.recorded == 2 and record.replayed == 4
    assert torch.equal(found[0], found[3]) and not torch.allclose(found[1], found[2])


def test_padding_takes_no_memory_from_requests() -> None:
    record = Again()
    runner = Runner(
        "target", MODELS["causal"], slots=2 * PAGE_SIZE, attention="triton", record=record
    )
    pages = runner.cache_usage.total_pages
    assert runner.cache_usage.held_pages == 0 and pages == 2
    spare = runner.cache.scratch
    assert spare is not None and not set(spare.pages) & set(range(pages))
    tables = [runner.reserve(PAGE_SIZE) for _ in range(3)]
    assert tables[2] is None and set(runner.cache.free) == {0, 1}


def test_passes_with_features_are_not_recorded() -> None:
    method, record = FEW[2], Again()
    assert isinstance(method, DFlash)
    engine = engine_with(record, only=method.draft)
    job = Request(method=method, prompt=(3, 1, 4, 1, 5), max_tokens=6).submit(engine)
    finish(engine)
    assert tokens(job) and not record.recorded


# Compiled layers.

SMALL = replace(causal_model().config, layers=4)
FORMS: dict[str, dict[str, Any]] = {
    "Qwen2": {"qkv_bias": True, "tied": True},
    "Qwen3": {"qk_norm": True},
    "OLMo 2": {"qk_norm": True, "wide_qk_norm": True, "norms": "after"},
    "Gemma 3": {"norms": "around", "norm_offset": True, "activation": "gelu_tanh"},
    "gpt-oss without experts": {"sinks": True, "out_bias": True, "mlp_bias": True},
    "some layers without rotation": {"unrotated": (1,)},
}


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured and run uncompiled: no compiler is needed."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    counters.clear()


def states(model: Stack, rows: int) -> torch.Tensor:
    ids = torch.arange(rows) % 20
    with torch.inference_mode():
        return model(ids, torch.arange(rows), RangesAttention(causal_ranges(rows)))


@pytest.mark.nightly
@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_of_any_form_is_captured_whole(form: str) -> None:
    torch.manual_seed(0)
    model = Transformer(replace(SMALL, **FORMS[form])).eval().requires_grad_(False)
    wanted = {rows: states(model, rows) for rows in (7, 1, 16, 33)}
    compile_layers(model)
    for rows, own in wanted.items():
        torch.testing.assert_close(states(model, rows), own)
    kinds = 2 if form == "some layers without rotation" else 1
    assert counters["stats"]["unique_graphs"] == 2 * 2 * kinds


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    "graphs", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["launched", "recorded"]
)
@pytest.mark.parametrize(
    "method",
    [FEW[0], *(pytest.param(method, marks=pytest.mark.nightly) for method in FEW[1:])],
    ids=lambda method: type(method).__name__,
)
def test_compiled_layers_give_the_same_tokens(
    method: Method, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "pack_model", lambda model: unpack_model(model))
    for model in MODELS.values():
        unpack_model(model)  # a matrix in blocks cannot be copied

    texts = []
    for compile in (False, True):
        engine = engine_with(Again() if graphs else None, compile=compile)
        modules = [module for each in engine.runners for module in each.model.modules()]
        assert any(isinstance(module, FusedBlock) for module in modules) == compile
        job = Request(method=method, prompt=(3, 1, 4, 1, 5), max_tokens=7).submit(engine)
        finish(engine)
        texts.append(tokens(job))
    assert texts[0] == texts[1]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own modules
@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler of C++")
def test_compiled_model_is_the_same() -> None:
    model = load_model("tiny-ar", dtype=torch.float32, device=CPU)
    unpack_model(model)
    wanted = {rows: states(model, rows) for rows in (5, 1, 18)}
    compile_layers(model)
    for rows, own in wanted.items():
        torch.testing.assert_close(states(model, rows), own, rtol=1e-4, atol=1e-4)
    unpack_model(model)
    assert not any(isinstance(module, FusedBlock) for module in model.modules())
    assert torch.equal(states(model, 5), wanted[5])


# Refusals.


@pytest.mark.parametrize(
    ("param", "check"), [("graphs", make_recorder), ("compile", check_compilation)]
)
@pytest.mark.parametrize(
    ("wanted", "device", "processes"),
    [(True, CPU, 1), (True, torch.device("cuda"), 2), (1, CPU, 1), ("yes", CPU, 1)],
)
def test_unavailable_options_are_refused(
    wanted: object, device: torch.device, processes: int, param: str, check: Callable[..., object]
) -> None:
    with refuses(param):
        check(wanted, device, processes)
