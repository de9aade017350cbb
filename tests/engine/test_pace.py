"""Draft lengths at a load, controlled by a simulated clock, without changing the text."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from helpers import tokens
from outpace import LLM
from outpace.decoding import Sampling
from outpace.engine.controllers import MAX_CONTROLLERS, StoredPassCosts, entry_name, read_entry
from outpace.engine.engine import Engine
from outpace.engine.runner import Runner
from outpace.measurements import MeasurementFile
from outpace.methods import (
    APD,
    Autoregressive,
    DFlash,
    Diffusion,
    Eagle,
    LeftToRight,
    Lookup,
    Method,
    Speculative,
    WeDLM,
)
from workload import Request, alone, new_engine, serve

LOSSLESS = [
    Speculative(draft="near", tokens=4),
    DFlash(draft="features", tokens=4),
    DFlash(draft="added", tokens=4),
    Eagle(draft="states", width=1, depth=3),
    Eagle(draft="states", width=2, depth=3, nodes=8),
    WeDLM(window=8, entropy=2.0, verify=True),
]
SAMPLED = Sampling(temperature=1.5, top_p=0.9, seed=3)


class Clock:
    """Advances by the cost of passes: a constant, and `row` for each row beyond the `free` ones."""

    def __init__(self, engine: Engine, row: float, free: int = 0) -> None:
        self.now, self.row, self.free = 0.0, row, free
        engine.clock = lambda: self.now
        for each in engine.runners:
            self.drive(each)

    def drive(self, runner: Runner) -> None:
        """Give the passes of a runner their time; those of a draft take almost none."""
        launch = runner.launch_pass

        def timed(feeds):
            rows = max(sum(len(feed.ids) - 1 for feed in feeds) - self.free, 0)
            self.now += 10 + self.row * rows if feeds[0].model == "target" else 0.1
            return launch(feeds)

        runner.launch_pass = timed


def batch(method: Method, count: int, **options) -> list[Request]:
    """Return this many requests, with prompts of different lengths."""
    samplings = (Sampling(), SAMPLED)
    return [
        Request(
            method=method,
            prompt=tuple(range(1 + n % 3, 9 + n % 5)),
            sampling=samplings[n % 2],
            **{"max_tokens": 40, **options},
        )
        for n in range(count)
    ]


def plain(requests: list[Request]) -> list[list[int]]:
    """Return the autoregressive output of the same model."""
    method = Autoregressive()
    alike = [replace(each, method=method, on=each.roles["target"]) for each in requests]
    return [alone(each)[0] for each in alike]


def lengths_of(results) -> list[int]:
    steps = [step for _, _, steps in results for step in steps if step.model == "target"]
    return [step.draft_length for step in steps if step.draft_length is not None]


@pytest.mark.sampled
@pytest.mark.parametrize("row", [0.0, 20.0], ids=["free rows", "dear rows"])
@pytest.mark.parametrize("method", LOSSLESS, ids=repr)
def test_lossless_methods_give_autoregressive_text(method: Method, row: float) -> None:
    engine = new_engine(pace="auto")
    Clock(engine, row)
    requests = batch(method, 4)
    results = serve(engine, requests)
    assert [ids for ids, *_ in results] == plain(requests)
    decided = lengths_of(results)
    assert decided and min(decided) == 1 and max(decided) > 2
    if row:  # which has been measured by now
        later = lengths_of(serve(engine, requests))
        assert later.count(1) > 0.5 * len(later)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_methods_in_one_engine_come_and_go(seed: int) -> None:
    rng, engine = Random(seed), new_engine(pace="auto", max_sequences=6)
    Clock(engine, rng.choice([0.0, 3.0, 20.0]))
    methods = [*LOSSLESS, APD(verifier="causal", window=1, lookahead=9, least=1)]
    requests = [request for method in methods for request in batch(method, 4)]
    rng.shuffle(requests)
    coming, jobs = list(requests), []
    while engine.step() or coming:
        for request in coming[: (count := rng.randrange(3))]:
            jobs.append(request.submit(engine))
        del coming[:count]
        if jobs and rng.random() < 0.03:
            engine.cancel(rng.choice(jobs))
    assert all(job.has_ended and job.error is None for job in jobs)
    answered = [
        (tokens(job), request)
        for job, request in zip(jobs, requests, strict=True)
        if job.finish_reason != "cancelled" and request.method in LOSSLESS
    ]
    assert len(answered) > 10
    assert [found for found, _ in answered] == plain([request for _, request in answered])


def test_lossy_lengths_stay_within_bounds() -> None:
    for method, least, most in (
        (APD(verifier="causal", window=4, lookahead=9, least=2), 2, 9),
        (WeDLM(window=8, entropy=0.2, least=3), 3, 8),
    ):
        engine = new_engine(pace="auto")
        Clock(engine, 20.0)
        found = [each for _ in range(2) for each in lengths_of(serve(engine, batch(method, 4)))]
        assert least <= min(found) < max(found) == most


@pytest.mark.parametrize(
    "method",
    [
        APD(verifier="causal", window=4, lookahead=9),
        WeDLM(window=6, entropy=2.0),
        LeftToRight(tokens=2, window=4, lookahead=6),
        Diffusion(block=4),
        Speculative(draft="near", tokens=4, verify="rejection"),
        DFlash(draft="features", tokens=4, verify="rejection"),
        Eagle(draft="states", width=1, depth=2, verify="rejection"),
        Autoregressive(),
    ],
    ids=repr,
)
def test_lossy_lengths_are_fixed_without_bounds(method: Method) -> None:
    engine = new_engine(pace="auto")
    Clock(engine, 20.0)
    requests = batch(method, 2, max_tokens=12)
    assert serve(engine, requests) == [alone(each) for each in requests]
    assert not engine.controllers


def test_a_decision_recovers_when_the_load_falls() -> None:
    engine = new_engine(pace="auto")
    Clock(engine, 20.0, free=4)
    method = Speculative(draft="causal", tokens=4)  # it is its own draft: everything is accepted
    _, many = (lengths_of(serve(engine, batch(method, 16))) for _ in range(2))
    assert many.count(1) > 0.5 * len(many)
    few = [lengths_of(serve(engine, batch(method, 1))) for _ in range(6)]
    assert min(few[-1]) > 1


def test_number_of_controllers_is_bounded() -> None:
    engine = new_engine(pace="auto")
    for number in range(MAX_CONTROLLERS + 10):
        method = WeDLM(window=4, entropy=1 + number / 1000, verify=True)
        engine.cancel(Request(method=method).submit(engine))
    assert len(engine.controllers) == MAX_CONTROLLERS


# Costs of passes that a later process starts from.

QUESTION = "Tom has 3 apples and buys 4 more. " * 3


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasurementFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5), raising=False)
    return MeasurementFile.of_user()


def new_llm() -> LLM:
    return LLM("tiny-ar", Lookup(), cache_gib=0.01)


def test_a_later_model_starts_from_stored_costs(file: MeasurementFile) -> None:
    first = new_llm()
    (plain,) = first.generate(QUESTION, method=Autoregressive(), max_tokens=60)
    (cold,) = first.generate(QUESTION, max_tokens=60)
    assert not [name for name in file.read_entries() if "pass costs" in name]
    del first
    gc.collect()
    (entry,) = [value for name, value in file.read_entries().items() if "pass costs" in name]
    assert min(entry["0/0"]["target"].values())[1] == 1
    later = new_llm()
    (warm,) = later.generate(QUESTION, max_tokens=60)
    (controller,) = later.engine.controllers.values()
    load = controller.loads[0, 0]
    assert load.costs["target"].prior in (read_entry(entry)[0, 0]["target"], {}) and load.due
    assert plain.ids == cold.ids == warm.ids


def test_costs_of_other_models_or_processors_are_not_used(
    file: MeasurementFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = new_llm()
    llm.generate(QUESTION, max_tokens=60)
    llm.engine.controllers.store_costs()
    runners = llm.pair(Lookup()).runners
    assert StoredPassCosts(file).read_costs(runners).keys() == {(0, 0)}
    assert not StoredPassCosts(file).read_costs(llm.pair(Speculative(draft="tiny-aux")).runners)
    monkeypatch.setattr("outpace.measurements.machine_name", lambda: "another processor: ")
    assert not StoredPassCosts(file).read_costs(runners)


def test_costs_of_a_loaded_machine_are_not_kept(
    file: MeasurementFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = new_llm()
    llm.generate(QUESTION, max_tokens=60)
    for load, kept in ((os.cpu_count() or 1) * 2.0, False), (0.5, True):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        llm.engine.controllers.store_costs()
        assert any("pass costs" in name for name in file.read_entries()) == kept


VALID = {"target": {"2": [2.0, 1.0]}}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"0/0": 3, "0": VALID, "x/0": VALID, "-1/0": VALID, "1000/1": {}, "0/0/0": VALID},
        {"0/0": {"draft": {"2": [2.0, 1.0]}}, "0/1": {**VALID, "draft": {}}, "0/2": {"target": 1}},
        {"0/0": {"target": {"2": [2.0], "x": [2.0, 1.0], "3": [2.0, "1"], "²": [1.0, 1.0]}}},
        {"0/0": {"target": {"2": [2.0, float("nan")], "4": [float("inf"), 1.0], "6": [8.0, -1.0]}}},
        {"0/0": {"target": {"2": [2.0, float("inf")], "4": [1000.0, 1.0], "6": [8.0, 0.0]}}},
    ],
    ids=str,
)
def test_invalid_costs_are_left_out(entry: object, file: MeasurementFile) -> None:
    assert read_entry(entry) == {} and read_entry({"0/0": VALID})
    llm = new_llm()
    file.write_entries({entry_name(llm.pair(Lookup()).runners): entry})
    (output,) = llm.generate(QUESTION, max_tokens=30)
    (plain,) = llm.generate(QUESTION, method=Autoregressive(), max_tokens=30)
    assert output.ids == plain.ids
