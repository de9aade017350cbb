"""Hidden states that are not stored while no draft runs, and the text that then runs again."""

from itertools import chain, repeat

import pytest
import torch

from helpers import (
    engine_of,
    enter,
    extending_draft,
    feature_draft,
    finish,
    hybrid_model,
    pages_in_use,
    request_of,
    runner,
    script,
    tokens,
)
from outpace.decoding import LengthRange, Prediction, Sampling
from outpace.methods import Autoregressive, DFlash, Eagle, Method, Speculative
from outpace.pacing.controller import PaceController
from workload import Request, alone, new_engine, result

SETTLED, PLAIN, DRAFT = 0, 1, 4
METHODS = [
    DFlash(draft="features", tokens=4),
    DFlash(draft="added", tokens=4),
    Eagle(draft="states", width=1, depth=3),
    Eagle(draft="states", width=2, depth=3, nodes=8),
]
PLANS = {
    "late": [SETTLED] * 3 + [DRAFT] * 99,
    "early": [DRAFT] * 3 + [PLAIN] * 3 + [SETTLED] * 11 + [DRAFT] * 99,
    "on and off": [SETTLED, SETTLED, DRAFT, DRAFT, SETTLED, PLAIN, DRAFT, PLAIN, SETTLED] * 9,
    "never": [SETTLED] * 99,
}


class Scripted(PaceController):
    """A controller with scripted lengths, which records its reports."""

    def __init__(self, plan: list[int]) -> None:
        super().__init__(LengthRange(values=range(1, 9), passes=lambda n, _: [("target", n, 1)]))
        self.now, self.plan_trial = plan[0], chain(plan, repeat(plan[-1]))
        self.told: list[tuple[int, int]] = []
        self.lost: list[int] = []

    def skips_drafting(self, unread: int, remaining: float) -> bool:
        return self.now == SETTLED

    def choose_length(self, request=None, unread=0, remaining=0.0, lost=0) -> int:
        self.now = next(self.plan_trial)
        self.lost.append(lost)
        return max(self.now, 1)

    def record_cycle(self, value: int, tokens: int) -> None:
        self.told.append((value, tokens))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_text_is_that_of_plain_decoding(method: Method, plan: str) -> None:
    engine = new_engine(max_rows=11)
    samplings = [Sampling(), Sampling(temperature=1.5, seed=2), Sampling()]
    prompt = tuple(range(1, 22))
    asked = [
        Request(method=method, prompt=prompt, max_tokens=40, sampling=sampling)
        for sampling in samplings
    ]
    jobs = [request.submit(engine) for request in asked]
    paces = [Scripted(PLANS[plan]) for _ in jobs]
    for job, pace in zip(jobs, paces, strict=True):
        job.pace = pace
    finish(engine)
    assert [result(job)[:2] for job in jobs] == [alone(request)[:2] for request in asked]
    lost = [slots for pace in paces for slots in pace.lost]
    again = [s for job in jobs for s in job.trace[1:] if s.draft_length == 1 and s.rows > 9]
    assert max(lost) > 9 and bool(again) == (plan != "never")
    assert all(tokens == 1 for pace in paces for value, tokens in pace.told if value == 1)
    assert pages_in_use(engine) == 0


@pytest.mark.parametrize("plan", PLANS)
def test_a_recurrent_target_stores_all_states(plan: str) -> None:
    target = hybrid_model(seed=1)
    models = {
        "target": target,
        "features": feature_draft(target),
        "states": extending_draft(target),
    }
    engine, paces, jobs = engine_of(*models.items(), max_rows=11), [], []
    for method in (Autoregressive(), METHODS[0], METHODS[2]):
        roles = {"target": "target", **method.model_names()}
        runners = {role: runner(engine, name) for role, name in roles.items()}
        options = {"max_tokens": 24, "sampling": Sampling(temperature=0.7, seed=2)}
        jobs.append(enter(engine, method, range(1, 22), runners=runners, **options))
        paces.append(Scripted(PLANS[plan]))
        jobs[-1].pace = paces[-1] if method.model_names() else None
    finish(engine)
    assert tokens(jobs[0]) == tokens(jobs[1]) == tokens(jobs[2])
    assert {slots for pace in paces for slots in pace.lost} == {0}


def seen(tokens: list[int], rows: int | None = None) -> Prediction:
    """Return a prediction of the target, with numbered features if any."""
    features = None if rows is None else torch.arange(float(rows))[:, None]
    return Prediction(tokens=tokens, features=features)


def test_missing_states_run_again_with_the_last_token() -> None:
    pace = Scripted([SETTLED, DRAFT, DRAFT, PLAIN, DRAFT])
    request = request_of(prompt=[5, 6, 7], max_tokens=8, mask_id=99, block=4, pace=pace)
    answers = [
        seen([8]),
        seen([9]),
        seen([10], 5),
        [11, 12, 13],
        seen([11, 20, 0, 0], 4),
        seen([21], 1),
        [22],
        seen([22, 23], 2),
    ]
    forwards = script(DFlash(draft=""), request, answers)
    assert request.tokens == [8, 9, 10, 11, 20, 21, 22, 23]
    assert [(each.start, list(each.ids), each.features_for) for each in forwards[:3]] == [
        (0, [5, 6, 7], None),
        (3, [8], None),
        (0, [5, 6, 7, 8, 9], "draft"),
    ]
    contexts = [each.context[:, 0].tolist() for each in forwards if each.context is not None]
    assert contexts == [[0, 1, 2, 3, 4], [0, 1, 0]]
    assert pace.lost == [3, 4, 0, 0, 0]
    assert pace.told[:4] == [(1, 1), (1, 1), (4, 2), (1, 1)]


def test_copies_do_not_enter_the_rates_of_a_draft() -> None:
    pace = Scripted([DRAFT])
    request = request_of(prompt=[1, 2, 3, 4, 1, 2, 3], max_tokens=8, pace=pace)
    copied = [[4], [9, 0, 0, 0, 0]]
    drafted = [[7], [7], [7], [7, 7, 8, 0], [5], [5], [5, 5, 6]]
    forwards = script(Speculative(draft="", lookup=True), request, [*copied, *drafted])
    assert forwards[1].ids == [4, 1, 2, 3, 4] and request.tokens == [4, 9, 7, 7, 8, 5, 5, 6]
    assert pace.told == [(4, 3), (3, 3)]
