"""Fast-dLLM: rows of each cache mode, tokens of each rule, and the end of an answer."""

import numpy as np
import pytest

from helpers import MASK, request_of, script
from outpace.decoding import FULL, Forward, Prediction, Request
from outpace.methods import FastDLLM

EOS = 9


def sequence(max_tokens: int = 6, **options: object) -> Request:
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


def test_an_answer_ends_once_all_before_its_end_is_filled() -> None:
    seq = sequence(9)
    answers = [sure((4, 0.3), (EOS, 0.95), (6, 0.5)), sure((4, 0.4))]
    forwards = script(FastDLLM(block=3), seq, answers)
    assert [shape(forward)[:3] for forward in forwards] == [
        (0, [1, 2, 3] + [M] * 9, 12),
        (3, [M, EOS], 5),
    ]
    assert (seq.tokens, seq.finish_reason) == ([4], "stop")


def test_blocks_are_those_of_the_model_or_of_32_tokens() -> None:
    for own, block in ((8, 8), (None, 32)):
        forward = next(FastDLLM().decode(sequence(40, block=own)))
        assert list(forward.predict) == list(range(3, 3 + block))
    assert list(next(FastDLLM().decode(sequence(5))).predict) == list(range(3, 8))


def test_confidence_basis_depends_on_the_family() -> None:
    for drawn in (False, True):
        forward = next(FastDLLM().decode(sequence(score_as_drawn=drawn)))
        assert forward.read.score_as_drawn is drawn
