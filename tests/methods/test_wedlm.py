"""WeDLM: its row order, the holes that it fills, and the tokens that it emits."""

import numpy as np
import pytest

from helpers import (
    MASK,
    Turned,
    causal_model,
    engine_of,
    enter,
    finish,
    masked_model,
    request_of,
    runner,
    tokens,
)
from outpace.decoding import CAUSAL, Forward, Prediction, Request, Sampling, Target
from outpace.engine.engine import Engine
from outpace.methods import Autoregressive, WeDLM
from refusal import refuses

SURE, TORN = 0.0, 2.0


def sequence(max_tokens: int = 12, **options: object) -> Request:
    return request_of(prompt=[1, 2], max_tokens=max_tokens, mask_id=MASK, **options)


def said(*tokens: int, entropy: list[float] | None = None) -> Prediction:
    """Return predictions of the wanted slots, of zero entropy by default."""
    doubts = np.array([SURE] * len(tokens) if entropy is None else entropy, dtype=np.float32)
    return Prediction(tokens=list(tokens), scores={"entropy": doubts, "confidence": 1 - doubts})


def shape(forward: Forward) -> tuple[int, list[int], list[int], list[int]]:
    """Return start, input, positions and wanted slots of a forward."""
    wanted = list(forward.predicted_slots())
    return forward.start, list(forward.ids), list(forward.positions or ()), wanted


def test_prompt_and_window_are_one_forward() -> None:
    forward = next(WeDLM(window=3).decode(sequence()))
    assert shape(forward) == (0, [1, 2, MASK, MASK, MASK], [0, 1, 2, 3, 4], [2, 3, 4])
    assert forward.predicted_rows(shift=1) == [2, 3, 4]
    assert forward.pattern == CAUSAL


def test_filled_tokens_precede_masks_at_their_positions() -> None:
    seq = sequence()
    decoding = WeDLM(window=4).decode(seq)
    next(decoding)
    forward = decoding.send(said(4, 5, 6, 7, entropy=[TORN, SURE, TORN, SURE]))
    assert seq.tokens == []
    assert shape(forward) == (2, [5, 7, MASK, MASK], [3, 5, 2, 4], [2, 4])
    assert forward.predicted_rows(shift=1) == [2, 3]

    forward = decoding.send(said(4, 6, entropy=[SURE, TORN]))
    assert seq.tokens == [4, 5]
    known, masks = ([4, 5, 7], [2, 3, 5]), ([MASK] * 3, [4, 6, 7])
    assert shape(forward) == (2, known[0] + masks[0], known[1] + masks[1], [4, 6, 7])

    forward = decoding.send(said(6, 8, 9, entropy=[SURE, TORN, TORN]))
    assert seq.tokens == [4, 5, 6, 7]
    assert forward.start == 4  # slots 2 and 3 have run with only earlier tokens visible
    assert (forward.ids[:2], forward.positions[:2]) == ([6, 7], [4, 5])


@pytest.mark.parametrize(
    ("options", "entropy", "filled"),
    [
        ({}, [0.1, 0.1, 0.39, 0.33], [2, 3, 5]),
        ({"penalty": 0.1}, [0.1, 0.31, 0.1, 0.1], [2, 4]),
        ({"penalty": 0.0}, [0.4, 0.4, 0.4, 0.4], [2]),
        ({"entropy": 0.5, "penalty": 0.0}, [0.4, 0.4, 0.4, 0.5], [2, 3, 4]),
        ({}, [1.0, 0.99, 0.5, 0.6], [4]),
        ({}, [1.0, 0.97, 0.97, 2.0], [3]),
        ({"entropy": None}, [0.02, 0.01, 0.01, 0.0], [2]),
        ({"entropy": 0.0}, [0.0, 0.0, 0.0, 0.0], [2]),
        ({"confidence": 0.7}, [0.2, 0.5, 0.31, 0.3], [2, 5]),
        ({"confidence": 0.9}, [0.5, 0.4, 0.4, 0.6], [3]),
    ],
    ids=str,
)
def test_holes_of_low_entropy_are_filled(
    options: dict, entropy: list[float], filled: list[int]
) -> None:
    decoding = WeDLM(window=4, **options).decode(sequence())
    next(decoding)
    forward = decoding.send(said(4, 5, 6, 7, entropy=entropy))
    known = forward.positions[: len(forward.ids) - len(forward.predict)]
    assert [slot for slot in range(2, 6) if slot in known] == filled


def test_length_one_uses_no_mask() -> None:
    method = WeDLM(window=4, least=1)
    lengths = method.length_range(Target(mask_id=MASK), auto=True)
    assert lengths is not None and [lengths.passes(value, 1)[0][1] for value in (1, 2, 4)] == [
        1,
        3,
        5,
    ]
    pace = Turned(lengths)
    seq = sequence(pace=pace)
    decoding = method.decode(seq)
    assert shape(next(decoding)) == (0, [1, 2], [], [2])
    assert shape(decoding.send(said(4))) == (2, [4], [], [3])
    pace.now = 2
    assert shape(decoding.send(said(5))) == (3, [5, MASK, MASK], [3, 4, 5], [4, 5])
    assert seq.tokens == [4, 5] and seq.canvas
    pace.now = 1
    forward = decoding.send(said(6, 7, entropy=[TORN, SURE]))
    assert shape(forward) == (4, [7, MASK], [5, 4], [4])  # a hole is left
    assert shape(decoding.send(said(6))) == (4, [6, 7], [], [6])
    assert seq.tokens == [4, 5, 6, 7] and not seq.canvas


def test_slots_after_the_limit_open_unless_clipped() -> None:
    for clip, masks in ((False, 4), (True, 3)):
        method = WeDLM(window=4, clip=clip)
        forward = next(method.decode(sequence(max_tokens=3)))
        assert list(forward.ids) == [1, 2] + [MASK] * masks
    sizes = {"clip": True}, {}, {"eager": False}, {"verify": True}
    assert [WeDLM(window=4, **size).slots_needed(2, 3) for size in sizes] == [5, 8, 12, 5]


def test_verified_tokens_are_the_autoregressive_ones() -> None:
    seq = sequence()
    decoding = WeDLM(window=4, verify=True).decode(seq)
    forward = next(decoding)
    assert shape(forward)[3] == [2, 3, 4, 5]
    assert forward.predicted_rows(shift=1) == [1, 3, 4, 5]

    forward = decoding.send(said(3, 5, 6, 7, entropy=[TORN, SURE, TORN, SURE]))
    assert seq.tokens == [3]  # from the prompt's last row; slots 3 and 5 hold guesses
    known, masks = ([3, 5, 7], [2, 3, 5]), ([MASK] * 3, [4, 6, 7])
    start, ids, positions, wanted = shape(forward)
    assert (start, ids, positions) == (2, known[0] + masks[0], known[1] + masks[1])
    assert wanted == [3, 4, 6, 7]
    assert forward.predicted_rows(shift=1) == [0, 1, 4, 5]

    forward = decoding.send(said(5, 9, 8, 8))
    assert seq.tokens == [3, 5, 9]
    assert (forward.start, forward.ids[:4]) == (4, [9, 7, 8, 8])
    assert list(forward.predict[:5]) == [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engine() -> Engine:
    models = ("masked", masked_model(seed=1)), ("plain", causal_model(seed=1))
    return engine_of(*models, slots=8192)


def test_a_model_without_a_mask_is_refused(engine: Engine) -> None:
    with refuses("method"):
        enter(engine, WeDLM(), [1], runners={"target": runner(engine, "plain")}, max_tokens=2)


def test_a_window_that_does_not_fit_is_refused(engine: Engine) -> None:
    runners = {"target": runner(engine, "masked")}
    with refuses("prompt"):
        enter(engine, WeDLM(window=200), [1], runners=runners, max_tokens=2)
    job = enter(engine, WeDLM(window=200, clip=True), [1], runners=runners, max_tokens=2)
    finish(engine)
    assert len(tokens(job)) == 2


def test_verified_samples_are_the_autoregressive_ones_of_the_same_seed(engine: Engine) -> None:
    runners = {"target": runner(engine, "masked")}
    kept = set()
    for seed in range(4):
        sampling = Sampling(temperature=1.5, top_p=0.9, seed=seed)
        both = [
            enter(engine, method, [3, 1, 4], runners=runners, max_tokens=30, sampling=sampling)
            for method in (Autoregressive(), WeDLM(window=8, entropy=2.0, verify=True))
        ]
        finish(engine)
        assert tokens(both[0]) == tokens(both[1])
        kept |= {step.committed for step in both[1].trace}
    assert max(kept) > 1
