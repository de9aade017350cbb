"""Recorded passes: the same tokens, with a substitute for graphs where there is no GPU."""

import pytest
import torch

from again import Again
from helpers import finish, run, tokens
from outpace.decoding import CAUSAL, Forward, Sample
from outpace.decoding.tree import Tree
from outpace.engine import graphs
from outpace.engine.cache import PAGE_SIZE
from outpace.engine.engine import Engine
from outpace.engine.graphs import GRAPH_SIZES, SCRATCH_SLOTS, make_recorder
from outpace.engine.runner import Runner
from outpace.methods import APD, Autoregressive, DFlash, Eagle, Method
from outpace.models.transformer import Transformer
from workload import KINDS, MODELS, Request

pytest.importorskip("triton")

CPU, KEPT = torch.device("cpu"), Sample(keep=True)
FIRST = (Autoregressive, APD, DFlash, Eagle)
QUICK = [next(method for method in KINDS if isinstance(method, kind)) for kind in FIRST]


def marks(method: Method) -> list[pytest.MarkDecorator]:
    """One case of each kind is not marked slow."""
    if method not in QUICK:
        return [pytest.mark.nightly]
    return [pytest.mark.nightly] if isinstance(method, Eagle) else []


def decode(method: Method, record: Again | None, slots: int = 32 * PAGE_SIZE) -> list[list[int]]:
    """Return tokens of two concurrent requests, and of a third that arrives later."""
    engine = Engine()
    for role, model in MODELS.items():
        engine.add_runner(Runner(role, model, slots=slots, attention="triton", record=record))
    prompts = ((3, 1, 4, 1, 5), tuple(range(1, 20)), (2, 7))
    asked = [Request(method=method, prompt=prompt, max_tokens=9) for prompt in prompts]
    jobs = [each.submit(engine) for each in asked[:2]]
    for _ in range(3):
        engine.step()
    jobs.append(asked[2].submit(engine))
    finish(engine)
    return [tokens(job) for job in jobs]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method",
    [pytest.param(method, marks=marks(method)) for method in KINDS],
    ids=lambda method: type(method).__name__,
)
def test_recorded_passes_give_the_same_tokens(method: Method) -> None:
    record = Again()
    assert decode(method, record) == decode(method, None)
    assert record.replayed >= record.recorded > 0


def test_a_shape_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record, engine = Again(), Engine()
    for role, model in MODELS.items():
        engine.add_runner(
            Runner(role, model, slots=32 * PAGE_SIZE, attention="triton", record=record)
        )

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
        asked = Forward(ids=[3, 1, 4, 1, 5], start=0, pattern=pattern, positions=places, read=KEPT)
        (told,) = run(runner, [asked], [table])
        assert told.logits is not None
        found.append(told.logits[0])
    return found


def test_padding_takes_no_memory_from_requests() -> None:
    record = Again()
    runner = Runner(
        "target", MODELS["causal"], slots=2 * PAGE_SIZE, attention="triton", record=record
    )
    pages = runner.cache_usage.total_pages
    assert runner.cache_usage.held_pages == 0 and pages == 2
    spare = runner.cache.scratch
    assert spare is not None and not set(spare.pages) & set(range(pages))
    assert all(
        after - before <= SCRATCH_SLOTS
        for before, after in zip(GRAPH_SIZES, GRAPH_SIZES[1:], strict=False)
    )
    tables = [runner.reserve(PAGE_SIZE) for _ in range(3)]
    assert tables[2] is None and {page for t in tables[:2] if t for page in t.pages} == {0, 1}


def test_passes_with_features_are_not_recorded() -> None:
    record = Again()
    method = next(method for method in KINDS if isinstance(method, DFlash))
    engine = Engine()
    for role, model in MODELS.items():
        own = record if role == method.draft else None
        engine.add_runner(Runner(role, model, slots=32 * PAGE_SIZE, attention="triton", record=own))
    job = Request(method=method, prompt=(3, 1, 4, 1, 5), max_tokens=6).submit(engine)
    finish(engine)
    assert tokens(job) and not record.recorded


@pytest.mark.parametrize(
    ("graphs", "device", "processes", "message"),
    [
        (True, CPU, 1, "graphs requires a CUDA device, got cpu"),
        (True, torch.device("cuda"), 2, "requires a model in one process"),
        (1, CPU, 1, "graphs must be True or False, got 1"),
        ("yes", CPU, 1, "graphs must be True or False, got 'yes'"),
    ],
)
def test_unavailable_graphs_are_refused(
    graphs: object, device: torch.device, processes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_recorder(graphs, device, processes)  # type: ignore[arg-type]
