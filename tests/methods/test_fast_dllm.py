"""Fast-dLLM: rows of each cache mode, tokens of each rule, and the end of an answer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import (
    MASK,
    diffusion_model,
    engine_of,
    enter,
    finish,
    request_of,
    runner,
    script,
    tokens,
)
from outpace.decoding import FULL, Forward, Prediction, Request
from outpace.engine.engine import Engine
from outpace.methods import FastDLLM

EOS = 9


def sequence(max_tokens: int = 6, **options: object) -> Request:
    """Return a request with a prompt of three tokens, by default for shift 0."""
    fields = {"eos": frozenset([EOS]), "shift": 0, **options}
    return request_of(prompt=[1, 2, 3], max_tokens=max_tokens, mask_id=MASK, **fields)


def sure(*said: tuple[int, float]) -> Prediction:
    """Return tokens and their confidence for all wanted holes."""
    return Prediction(
        tokens=[token for token, _ in said],
        scores={"confidence": np.array([score for _, score in said], dtype=np.float32)},
    )


def shape(forward: Forward) -> tuple[int, list[int], int, list[int]]:
    """Return start, rows, visible end and wanted slots of a forward."""
    assert forward.pattern == FULL and forward.predict is not None
    return forward.start, list(forward.ids), forward.num_visible, list(forward.predict)


ANSWERS = [
    sure((4, 0.5), (5, 0.95), (6, 0.2)),
    sure((4, 0.92), (6, 0.93)),
    sure((7, 0.3), (8, 0.2), (7, 0.1)),
    sure((8, 0.91), (7, 0.9)),
]
M = MASK


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (
            None,
            [
                (0, [1, 2, 3, M, M, M, M, M, M], 9, [3, 4, 5]),
                (0, [1, 2, 3, M, 5, M, M, M, M], 9, [3, 5]),
                (0, [1, 2, 3, 4, 5, 6, M, M, M], 9, [6, 7, 8]),
                (0, [1, 2, 3, 4, 5, 6, 7, M, M], 9, [7, 8]),
            ],
        ),
        (
            "prefix",
            [
                (0, [1, 2, 3, M, M, M, M, M, M], 9, [3, 4, 5]),
                (3, [M, 5, M, M, M, M], 9, [3, 5]),
                (0, [1, 2, 3, 4, 5, 6, M, M, M], 9, [6, 7, 8]),
                (6, [7, M, M], 9, [7, 8]),
            ],
        ),
        (
            "dual",
            [
                (0, [1, 2, 3, M, M, M, M, M, M], 9, [3, 4, 5]),
                (3, [M, 5, M], 9, [3, 5]),
                (0, [1, 2, 3, 4, 5, 6, M, M, M], 9, [6, 7, 8]),
                (6, [7, M, M], 9, [7, 8]),
            ],
        ),
    ],
    ids=str,
)
def test_cache_mode_sets_start_and_visible_end(cache: str | None, expected: list) -> None:
    seq = sequence()
    forwards = script(FastDLLM(cache=cache, block=3), seq, ANSWERS)
    assert [shape(forward) for forward in forwards] == expected
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 6, 7, 8, 7], "length")
    assert [forward.read.step for forward in forwards] == [0, 1, 2, 3]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_refresh_of_a_shifted_model_fills_first_token(cache: str) -> None:
    answers = [sure((4, 0.1)), sure((5, 0.9), (6, 0.95)), sure((7, 0.2)), sure((8, 1.0), (7, 1.0))]
    forwards = script(FastDLLM(cache=cache, block=3), sequence(shift=1), answers)
    assert [list(forward.predict) for forward in forwards] == [[3], [4, 5], [6], [7, 8]]
    assert [forward.start for forward in forwards] == [0, 3, 0, 6]


def test_shifted_model_without_cache() -> None:
    forwards = script(FastDLLM(cache=None, block=3), sequence(shift=1), ANSWERS)
    assert [list(forward.predict) for forward in forwards] == [[3, 4, 5], [3, 5], [6, 7, 8], [7, 8]]


def test_an_answer_ends_once_all_before_its_end_is_filled() -> None:
    seq = sequence(9)
    answers = [sure((4, 0.3), (EOS, 0.95), (6, 0.5)), sure((4, 0.4))]
    forwards = script(FastDLLM(block=3), seq, answers)
    assert [shape(forward)[:3] for forward in forwards] == [
        (0, [1, 2, 3] + [M] * 9, 12),
        (3, [M, EOS], 5),
    ]
    assert (seq.tokens, seq.finish_reason) == ([4], "stop")


def test_a_fixed_canvas_is_filled_to_its_end() -> None:
    seq = sequence(4)
    answers = [sure((4, 1.0), (EOS, 1.0)), sure((6, 1.0), (7, 1.0))]
    forwards = script(FastDLLM(block=2, canvas=True), seq, answers)
    assert [forward.start for forward in forwards] == [0, 0]
    assert (seq.tokens, seq.finish_reason) == ([4], "stop")


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({"threshold": 0.6}, [1, 2]),
        ({"threshold": 0.9}, [1]),
        ({"threshold": None}, [1]),
        ({"factor": 1.5}, [1, 2]),
        ({"factor": 2.5}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_rules_of_confidence(options: dict, taken: list[int]) -> None:
    answer = sure((4, 0.5), (5, 0.8), (6, 0.7), (7, 0.4))
    decoding = FastDLLM(**options).decode(sequence(4))
    assert next(decoding).read.scores == ("confidence",)
    try:
        left = list(decoding.send(answer).predict)
    except StopIteration:
        left = []
    assert [index for index in range(4) if index + 3 not in left] == taken


def test_budget_uses_entropy() -> None:
    entropy = np.array([0.3, 0.1, 2.0, 0.2], dtype=np.float32)
    decoding = FastDLLM(budget=0.25).decode(sequence(4))
    assert next(decoding).read.scores == ("entropy",)
    left = decoding.send(Prediction(tokens=[4, 5, 6, 7], scores={"entropy": entropy})).predict
    assert list(left) == [3, 5]


def test_blocks_are_those_of_the_model_or_of_32_tokens() -> None:
    for own, block in ((8, 8), (None, 32)):
        forward = next(FastDLLM().decode(sequence(40, block=own)))
        assert list(forward.predict) == list(range(3, 3 + block))
    assert list(next(FastDLLM().decode(sequence(5))).predict) == list(range(3, 8))


def test_confidence_basis_depends_on_the_family() -> None:
    for drawn in (False, True):
        forward = next(FastDLLM().decode(sequence(score_as_drawn=drawn)))
        assert forward.read.score_as_drawn is drawn


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine with a model of shift 1."""
    return engine_of(("model", diffusion_model(seed=1)), slots=2048)


@pytest.mark.parametrize("block", [4, 24])
def test_cache_needs_no_extra_forward(engine: Engine, block: int) -> None:
    for threshold, count in ((None, 24), (1e-9, 24 // block)):
        for cache in (None, "prefix", "dual"):
            method = FastDLLM(threshold=threshold, cache=cache, block=block)
            runners = {"target": runner(engine, "model")}
            job = enter(engine, method, [5, 4, 3], runners=runners, max_tokens=24, eos=frozenset())
            finish(engine)
            assert len(tokens(job)) == 24
            # A refresh of a shifted model fills one token at any threshold.
            split = cache is not None and threshold is not None
            assert len(job.request.trace) == (2 * count if split else count)


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([0, 1]), st.data())
def test_every_forward_fills_and_the_canvas_ends(
    max_tokens: int, block: int, shift: int, data: st.DataObject
) -> None:
    cache = data.draw(st.sampled_from([None, "prefix", "dual"]))
    rule = data.draw(st.sampled_from([{}, {"threshold": None}, {"factor": 1.0}]))
    seq, count = sequence(max_tokens, shift=shift), 0
    decoding, answer = FastDLLM(cache=cache, block=block, **rule).decode(seq), None
    while seq.finish_reason is None:
        try:
            forward = next(decoding) if answer is None else decoding.send(answer)
        except StopIteration:
            break
        count, wanted = count + 1, len(forward.predict)
        assert wanted > 0
        scores = st.lists(st.floats(0, 1, width=32), min_size=wanted, max_size=wanted)
        confidence = np.array(data.draw(scores), dtype=np.float32)
        answer = Prediction(tokens=[5] * wanted, scores={"confidence": confidence})
    assert seq.tokens == [5] * max_tokens
    assert count <= max_tokens
