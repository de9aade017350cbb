"""Canvas: model input, holes and filled tokens."""

from __future__ import annotations

import numpy as np
import pytest

from outpace.decoding import Canvas, Prediction, Request, Target
from outpace.decoding.canvas import split_blocks


def test_holes_are_masks_and_filled_in_any_order() -> None:
    canvas = Canvas([1, 9], mask_id=9)
    assert (len(canvas), canvas.prefix_length, canvas.holes) == (2, 2, [])
    canvas.append_slots(4)
    assert canvas.ids == [1, 9, 9, 9, 9, 9]
    canvas.fill_slots([4, 2], [6, 7])
    assert canvas.ids == [1, 9, 7, 9, 6, 9]
    assert canvas.holes == [3, 5]
    assert canvas.prefix_length == 3
    canvas.fill_slots([3, 5], [8, 8])
    assert canvas.prefix_length == len(canvas) == 6


def test_holes_of_a_part() -> None:
    canvas = Canvas([], mask_id=0)
    canvas.append_slots(8)
    canvas.fill_slots([3, 5], [1, 1])
    assert canvas.holes_within(2, 6) == [2, 4]
    assert canvas.holes_within(3, 4) == []
    assert canvas.holes_within(6, 99) == [6, 7]


def test_filled_slots_exclude_holes() -> None:
    canvas = Canvas([9, 1], mask_id=9)
    canvas.append_slots(4)
    canvas.fill_slots([4], [9])
    assert canvas.filled_slots(0) == [0, 1, 4]
    assert canvas.filled_slots(1) == [1, 4]
    assert canvas.filled_slots(5) == []


@pytest.mark.parametrize("slot", [0, 3, 9])
def test_filling_a_token_raises(slot: int) -> None:
    canvas = Canvas([1], mask_id=0)
    canvas.append_slots(3)
    canvas.fill_slots([3], [5])
    with pytest.raises(ValueError, match=rf"slot {slot} is not a hole; the holes are \[1, 2\]"):
        canvas.fill_slots([slot], [7])
    assert canvas.ids == [1, 0, 0, 5]


def test_truncated_slots_are_gone() -> None:
    canvas = Canvas([1], mask_id=0)
    canvas.append_slots(5)
    canvas.fill_slots([2, 5], [7, 8])
    canvas.truncate(4)
    assert canvas.ids == [1, 0, 7, 0]
    assert canvas.holes == [1, 3]
    canvas.truncate(9)
    assert (len(canvas), canvas.prefix_length) == (4, 1)


def test_truncate_drops_tokens_and_holes() -> None:
    canvas = Canvas([1, 2], mask_id=0)
    canvas.append_slots(4)
    canvas.fill_slots([4], [7])
    canvas.truncate(4)
    assert (canvas.ids, canvas.holes) == ([1, 2, 0, 0], [2, 3])
    canvas.truncate(9)
    assert len(canvas) == 4


def test_prefix_before_first_hole_is_committed() -> None:
    seq = Request(prompt=[1], max_tokens=4, eos=frozenset([9]))
    canvas = Canvas(seq.prompt, mask_id=0)
    canvas.append_slots(4)
    canvas.fill_slots([2], [6])
    assert canvas.commit_prefix(seq, [2]) and seq.tokens == []
    canvas.fill_slots([1], [5])
    assert canvas.commit_prefix(seq, [1]) and seq.tokens == [5, 6]
    canvas.fill_slots([3, 4], [7, 8])
    assert not canvas.commit_prefix(seq, [3, 4])
    assert (seq.tokens, seq.finish_reason) == ([5, 6, 7, 8], "length")


def test_slots_after_end_of_sequence_are_dropped() -> None:
    seq = Request(prompt=[9], max_tokens=6, eos=frozenset([9]))
    canvas = Canvas(seq.prompt, mask_id=0)
    canvas.append_slots(6)
    canvas.fill_slots([5], [9])
    assert canvas.commit_prefix(seq, [5]) and canvas.ids == [9, 0, 0, 0, 0, 9]
    canvas.fill_slots([3, 4], [9, 9])
    assert canvas.commit_prefix(seq, [4, 3]) and canvas.ids == [9, 0, 0, 9]
    canvas.fill_slots([1, 2], [4, 5])
    assert not canvas.commit_prefix(seq, [1, 2])
    assert (seq.tokens, seq.finish_reason) == ([4, 5], "stop")


def test_last_block_may_be_shorter() -> None:
    assert split_blocks(3, 11, 4) == [(3, 7), (7, 11)]
    assert split_blocks(3, 10, 4) == [(3, 7), (7, 10)]
    assert split_blocks(3, 10, 99) == [(3, 10)]


def test_log_probabilities_stay_with_their_slots() -> None:
    request = Request(prompt=[1, 2], max_tokens=4, logprobs=True, target=Target(mask_id=0))
    canvas = Canvas.from_request(request)
    canvas.append_slots(4)
    scores = {"logprob": np.array([-9.0, -0.5, -0.25, -4.0], dtype=np.float32)}
    out = Prediction(tokens=[9, 5, 6, 8], scores=scores)
    assert canvas.fill_chosen([3, 5], np.array([1, 0]), out, first=1) == [5, 3]
    assert canvas.ids[2:] == [0, 5, 0, 6]
    assert canvas.commit_until(request) and request.tokens == request.scores == []
    canvas.fill_chosen([2, 4], np.array([0]), Prediction(tokens=[7, 3], scores=scores))
    assert canvas.commit_until(request) and request.tokens == [7, 5]
    assert request.scores == [-9.0, -0.5]
    canvas.fill_chosen([4], np.array([0]), Prediction(tokens=[4], scores=scores), first=0)
    assert not canvas.commit_until(request) and request.tokens == [7, 5, 4, 6]
    assert request.scores == [-9.0, -0.5, -9.0, -0.25]


def test_scores_are_stored_only_on_request() -> None:
    request = Request(prompt=[1], max_tokens=1)
    canvas = Canvas.from_request(request)
    canvas.append_slots(1)
    canvas.fill_chosen([1], np.array([0]), Prediction(tokens=[4]))
    assert not canvas.commit_until(request) and request.scores == []


def test_replaced_tokens_are_those_that_differ() -> None:
    canvas = Canvas([1, 2], mask_id=0)
    canvas.append_slots(3)
    canvas.fill_slots([2, 3], [5, 6])
    scores = {"logprob": np.array([-1, -2, -3, -4], dtype=np.float32)}
    out = Prediction(tokens=[9, 5, 7, 8], scores=scores)
    assert canvas.replace_chosen([1, 2, 3], np.array([1, 2]), out, 0) == [3]
    assert (canvas.ids, canvas.holes) == ([1, 2, 5, 7, 0], [4])
    assert canvas.logprobs == [0, 0, 0, -3, 0]
    assert canvas.replace_chosen([2, 3], np.array([], dtype=np.int64), out, 2) == []
    assert canvas.replace_chosen([2, 3], np.array([0]), out, 2) == [2]
    assert canvas.ids == [1, 2, 7, 7, 0]
