"""D2F: a pipeline of blocks, driven by hand."""

from typing import Any

import pytest

from blocks import predicted, shape
from helpers import MASK, Turned, request_of, script
from outpace.decoding import FULL, Forward, Prediction, Request, Sampling, Target
from outpace.methods import D2F

EOS = 0


def sequence(max_tokens: int = 8, **fields: Any) -> Request:
    return request_of(
        prompt=[1, 2, 3], max_tokens=max_tokens, mask_id=MASK, eos=frozenset([EOS]), **fields
    )


def test_the_pipeline() -> None:
    """Fill the first block, append a second one, cache the first one once it is full.

    A full block runs once more without holes. The next forward starts after it, or at its last row
    where that may predict the first hole.
    """
    seq = sequence()
    forwards = script(
        D2F(block=4, add=0.5),
        seq,
        [
            predicted("4567", "-*--"),  # none is above the threshold: its best one
            predicted("467", "--*"),  # one of four is less than half: no second block yet
            predicted(
                "451234", "+-----"
            ),  # appended, but not activated: only tokens above the threshold
            predicted("57321", "-++--"),  # now it has one; the first block takes its best one
            predicted("52", "*-"),  # the first block is full, so the second takes its best one
            predicted("2", "-"),
        ],
    )
    assert [shape(forward) for forward in forwards] == [
        (0, "123____", (3, 4), [3, 4, 5, 6]),
        (2, "3_5__", (1, 4), [3, 5, 6]),
        (2, "3_5_7____", (1, 4, 4), [3, 5, 7, 8, 9, 10]),
        (3, "45_7____", (4, 4), [5, 7, 8, 9, 10]),
        (3, "455773__", (4, 4), [9, 10]),
        (7, "735_", (4,), [10]),
    ]
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 5, 7, 7, 3, 5, 2], "length")


def test_full_blocks_after_the_last_hole_wait() -> None:
    answers = [
        predicted("456", "*--"),
        predicted("56789", "*-+++"),
    ]  # the second is full before the first
    forwards = script(D2F(block=3, add=0.3), sequence(6), [*answers, predicted("6", "-")])
    assert shape(forwards[2]) == (3, "45_", (3,), [5])
    forwards = script(D2F(block=3, add=0.3), sequence(9), [*answers, predicted("6123", "-+++")])
    assert shape(forwards[2]) == (3, "45_789___", (3, 3, 3), [5, 9, 10, 11])


ENDING = [
    predicted("4567", "+---"),
    predicted("5671234", "*--+---"),
    predicted("672041234", "*--+-+---"),  # an end-of-sequence in the second of three blocks
]


def test_end_of_sequence_drops_later_blocks() -> None:
    seq = sequence(40)
    answers = [*ENDING, predicted("723", "*--"), predicted("23", "-*"), predicted("2", "-")]
    forwards = script(D2F(block=4), seq, answers)
    assert [shape(forward) for forward in forwards][2:] == [
        (3, "45__1_______", (4, 4, 4), [5, 6, 8, 9, 10, 11, 12, 13, 14]),
        (3, "456_1_0_", (4, 4), [6, 8, 10]),
        (3, "45671_0_", (4, 4), [8, 10]),
        (7, "1_03", (4,), [8]),
    ]
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 6, 7, 1, 2], "stop")


def first_choice(method: D2F, answer: Prediction) -> list[int]:
    """Return the slots that a forward over four holes fills."""
    decoding = method.decode(sequence(4))
    next(decoding)
    holes = decoding.send(answer).predict
    return [slot for slot in range(3, 7) if slot not in holes]


def test_threshold_is_exclusive() -> None:
    answer = predicted("4567", "-*+*")
    assert first_choice(D2F(block=4, confidence=0.4), answer) == [4, 5, 6]
    assert first_choice(D2F(block=4, confidence=0.5), answer) == [5]
    assert first_choice(D2F(block=4, confidence=1.0), predicted("4567", "-+-+")) == [4]


@pytest.mark.parametrize(("add", "activate"), [(0.3, 0.3), (0.30001, 0.30001), (0.3, 0.4)])
def test_share_threshold_is_inclusive(add: float, activate: float) -> None:
    decoding = D2F(block=10, add=add, activate=activate).decode(sequence(20))
    next(decoding)
    second = decoding.send(predicted("4567891234", "+++-------"))
    assert len(second.predict) == (7 if add > 0.3 else 17)
    if add == 0.3:
        third = decoding.send(predicted("7891234" + "4567891234", "-" * 17))
        assert len(third.predict) == (15 if activate == 0.3 else 16)


def test_noise_is_fresh_in_every_forward() -> None:
    seq = sequence(2, sampling=Sampling(temperature=1.0))
    forwards = script(D2F(), seq, [predicted("45", "+-"), predicted("5", "-")])
    assert [forward.read for forward in forwards] == [
        seq.sample(step, scores=("confidence",), score_as_drawn=True) for step in (0, 1)
    ]


def fed(forward: Forward) -> tuple[int, list[int], object, object]:
    """Return input, pattern and wanted slots of a forward."""
    return forward.start, list(forward.ids), forward.pattern, forward.predict


def test_length_one_uses_no_mask() -> None:
    method = D2F(block=4, add=0.5, least=1)
    lengths = method.length_range(Target(shift=1, mask_id=MASK), auto=True)
    assert lengths is not None and lengths.values == (1, 64)
    assert [lengths.passes(value, 4)[0][1] for value in lengths.values] == [1, 10]
    pace = Turned(lengths)
    seq = sequence(12, pace=pace)
    decoding = method.decode(seq)
    assert fed(next(decoding)) == (0, [1, 2, 3], (3,), None)
    assert fed(decoding.send(Prediction(tokens=[4]))) == (3, [4], (1,), None)
    pace.now = 64
    block = [MASK] * 4
    assert fed(decoding.send(Prediction(tokens=[5]))) == (4, [5, *block], (1, 4), (5, 6, 7, 8))
    pace.now = 1
    some = decoding.send(predicted("6798", "++--"))
    assert fed(some) == (5, [6, 7, MASK, MASK], (4,), (7, 8))  # no block is appended
    assert fed(decoding.send(predicted("89", "++"))) == (5, [6, 7, 8, 9], (4,), None)
    assert seq.tokens == [4, 5, 6, 7, 8, 9]
    pace.cycles, pace.paused_until = 1, 3
    assert fed(decoding.send(Prediction(tokens=[1]))) == (9, [1], FULL, None)
    with pytest.raises(StopIteration):
        decoding.send(Prediction(tokens=[EOS]))
    assert seq.tokens == [4, 5, 6, 7, 8, 9, 1] and seq.finish_reason == "stop"


@pytest.mark.parametrize(
    "method, target",
    [
        (D2F(), {}),
        (D2F(least=1), {"shift": 0}),
        (D2F(least=1), {"is_block_causal": True}),
        (D2F(least=1, canvas=True), {}),
    ],
)
def test_fixed_length_without_shift(method: D2F, target: dict[str, Any]) -> None:
    asked = {"shift": 1, "mask_id": MASK, **target}
    assert method.length_range(Target(**asked), auto=True) is None
    assert D2F(least=1).length_range(Target(shift=1, mask_id=MASK), auto=False) is None
