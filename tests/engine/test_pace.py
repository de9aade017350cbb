"""Draft lengths at a load, controlled by a simulated clock, without changing the text."""

from random import Random

import pytest

from helpers import enter, finish, runner, tokens
from outpace.decoding import Sampling
from outpace.engine.controllers import MAX_CONTROLLERS
from outpace.engine.engine import Engine
from outpace.engine.runner import Runner
from outpace.methods import (
    APD,
    Autoregressive,
    DFlash,
    Diffusion,
    Eagle,
    LeftToRight,
    Method,
    Speculative,
    WeDLM,
)
from workload import EOS, Request, alone, new_engine, serve

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
    engine = new_engine()
    jobs = [
        enter(
            engine,
            Autoregressive(),
            request.prompt,
            runners={"target": runner(engine, request.roles["target"])},
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            eos=EOS,
        )
        for request in requests
    ]
    finish(engine)
    return [tokens(job) for job in jobs]


def dials(results) -> list[int]:
    """Return the chosen lengths, cycle by cycle."""
    steps = [step for _, _, steps in results for step in steps if step.model == "target"]
    return [step.dial for step in steps if step.dial is not None]


@pytest.mark.sampled
@pytest.mark.parametrize("row", [0.0, 20.0], ids=["free rows", "dear rows"])
@pytest.mark.parametrize("method", LOSSLESS, ids=repr)
def test_lossless_methods_give_autoregressive_text(method: Method, row: float) -> None:
    engine = new_engine(pace="auto")
    Clock(engine, row)
    requests = batch(method, 4)
    results = serve(engine, requests)
    assert [ids for ids, *_ in results] == plain(requests)
    decided = dials(results)
    assert decided and min(decided) == 1 and max(decided) > 2
    if row:  # which has been measured by now
        later = dials(serve(engine, requests))
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
        if job.request.finish_reason != "cancelled" and request.method in LOSSLESS
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
        found = [dial for _ in range(2) for dial in dials(serve(engine, batch(method, 4)))]
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
    _, many = (dials(serve(engine, batch(method, 16))) for _ in range(2))
    assert many.count(1) > 0.5 * len(many)
    few = [dials(serve(engine, batch(method, 1))) for _ in range(6)]
    assert min(few[-1]) > 1


def test_number_of_controllers_is_bounded() -> None:
    engine = new_engine(pace="auto")
    for number in range(MAX_CONTROLLERS + 10):
        method = WeDLM(window=4, entropy=1 + number / 1000, verify=True)
        engine.cancel(Request(method=method).submit(engine))
    assert len(engine.controllers) == MAX_CONTROLLERS
