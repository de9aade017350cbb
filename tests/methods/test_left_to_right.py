"""The leftmost k holes of each forward."""

from __future__ import annotations

from helpers import MASK, request_of, script
from outpace.decoding import FULL, Forward, Request, Sampling
from outpace.methods import LeftToRight


def sequence(max_tokens: int = 5) -> Request:
    """Return a request with a prompt of three tokens."""
    return request_of(prompt=[1, 2, 3], max_tokens=max_tokens, mask_id=MASK)


def shape(forward: Forward) -> tuple[int, list[int], list[int]]:
    """Return start, input and wanted slots of a forward."""
    return forward.start, list(forward.ids), list(forward.predicted_slots())


def test_whole_canvas_and_one_token_by_default() -> None:
    seq = sequence(max_tokens=3)
    forwards = script(LeftToRight(), seq, [[4], [5], [6]])
    assert [shape(forward) for forward in forwards] == [
        (0, [1, 2, 3, MASK, MASK, MASK], [3]),
        (0, [1, 2, 3, 4, MASK, MASK], [4]),
        (0, [1, 2, 3, 4, 5, MASK], [5]),
    ]
    assert all(forward.pattern == FULL for forward in forwards)
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 6], "length")


def test_last_group_is_the_remainder() -> None:
    forwards = script(LeftToRight(tokens=2), sequence(), [[4, 4], [5, 5], [6]])
    assert [shape(forward)[2] for forward in forwards] == [[3, 4], [5, 6], [7]]


def test_lookahead_limits_the_masks() -> None:
    forwards = script(LeftToRight(lookahead=2), sequence(max_tokens=3), [[4], [5], [6]])
    assert [shape(forward)[1][3:] for forward in forwards] == [
        [MASK, MASK],
        [4, MASK, MASK],
        [4, 5, MASK],
    ]


def test_window_recomputes_last_group_and_older_tokens() -> None:
    forwards = script(
        LeftToRight(tokens=2, window=2, lookahead=2), sequence(6), [[4, 5], [6, 7], [8, 9]]
    )
    assert [shape(forward)[:2] for forward in forwards] == [
        (0, [1, 2, 3, MASK, MASK]),
        (2, [3, 4, 5, MASK, MASK]),
        (4, [5, 6, 7, MASK, MASK]),
    ]


def test_window_of_one_keeps_the_predicting_row() -> None:
    forwards = script(LeftToRight(window=1), sequence(2), [[4], [5]])
    assert shape(forwards[1]) == (3, [4, MASK], [4])


def test_end_of_sequence_ends_the_answer() -> None:
    seq = request_of(prompt=[1], max_tokens=9, mask_id=MASK, eos=frozenset([7]))
    script(LeftToRight(tokens=3), seq, [[4, 7, 5]])
    assert (seq.tokens, seq.finish_reason) == ([4], "stop")


def test_noise_is_fresh_in_every_forward() -> None:
    seq = request_of(prompt=[1], max_tokens=2, mask_id=MASK, sampling=Sampling(temperature=1.0))
    forwards = script(LeftToRight(), seq, [[4], [5]])
    assert [forward.read for forward in forwards] == [seq.sample(0), seq.sample(1)]
