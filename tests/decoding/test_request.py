"""`Request.commit`, the only way for a token to become output, and canvases filled in any order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.decoding import Canvas, Prediction, Request, Sampling, Target
from outpace.decoding.canvas import split_blocks

EOS = 9


def sequence(**options) -> Request:
    fields = {"prompt": [1, 2, 3], "max_tokens": 5, "eos": frozenset([EOS])}
    return Request(**fields | options)


@pytest.mark.parametrize(
    ("options", "committed", "tokens", "reason"),
    [
        ({}, [], [], None),
        ({}, [4, 5], [4, 5], None),
        ({}, [4, EOS, 5], [4], "stop"),
        ({}, [4] * 6, [4] * 5, "length"),
        ({"max_tokens": 1}, [4, EOS], [4], "length"),
        ({"prompt": [EOS, EOS]}, [4], [4], None),
        ({"finish_reason": "cancelled"}, [4], [], "cancelled"),
        ({"stop_ids": frozenset([7]), "min_tokens": 2}, [7, 4, 7], [7, 4], "stop"),
        ({"fixed_tokens": {4: 6, 5: 7}}, [4], [4, 6, 7], None),
        ({"fixed_tokens": {4: EOS}, "max_tokens": 2}, [4], [4, EOS], "length"),
    ],
)
def test_committed_tokens_are_output(
    options: dict, committed: list[int], tokens: list[int], reason: str | None
) -> None:
    seq = sequence(**options)
    assert seq.commit(committed) == (reason is None)
    assert (seq.tokens, seq.finish_reason) == (tokens, reason)
    assert seq.ids == seq.prompt + tokens


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8), st.integers(1, 12))
def test_commit_sizes_do_not_matter(groups: list[list[int]], max_tokens: int) -> None:
    seq = sequence(max_tokens=max_tokens)
    for group in groups:
        seq.commit(group)
    tokens = [token for group in groups for token in group]
    ended = tokens.index(EOS) if EOS in tokens else len(tokens)
    assert seq.tokens == tokens[: min(ended, max_tokens)]
    reason = "length" if max_tokens <= ended and max_tokens <= len(tokens) else None
    assert seq.finish_reason == (reason or ("stop" if EOS in tokens else None))


def test_read_carries_the_sampling_of_the_request() -> None:
    seq = sequence(sampling=Sampling(temperature=0.5, seed=3))
    read = seq.sample(4, keep=True, scores=("entropy",))
    assert (read.sampling, read.step, read.keep) == (seq.sampling, 4, True)
    assert read.scores == ("entropy",)


def test_holes_are_masks_and_filled_in_any_order() -> None:
    canvas = Canvas([1, 9], mask_id=9)
    assert (len(canvas), canvas.prefix_length, canvas.holes) == (2, 2, [])
    canvas.append_slots(4)
    assert canvas.ids == [1, 9, 9, 9, 9, 9]
    canvas.fill_slots([4, 2], [9, 7])
    assert canvas.ids == [1, 9, 7, 9, 9, 9]
    assert (canvas.holes, canvas.prefix_length) == ([3, 5], 3)
    assert canvas.filled_slots(0) == [0, 1, 2, 4] and canvas.filled_slots(4) == [4]
    assert canvas.holes_within(3, 5) == [3] and canvas.holes_within(4, 99) == [5]
    canvas.fill_slots([3, 5], [8, 8])
    assert canvas.prefix_length == len(canvas) == 6


@pytest.mark.parametrize("slot", [0, 3, 9])
def test_only_holes_are_filled(slot: int) -> None:
    canvas = Canvas([1], mask_id=0)
    canvas.append_slots(3)
    canvas.fill_slots([3], [5])
    with pytest.raises(ValueError, match=f"slot {slot} "):
        canvas.fill_slots([slot], [7])
    assert canvas.ids == [1, 0, 0, 5]


def test_fixed_tokens_are_not_holes() -> None:
    canvas = Canvas([1], mask_id=0, fixed_tokens={2: 7, 4: 8})
    canvas.append_slots(2)
    canvas.append_slots(2)
    assert (canvas.ids, canvas.holes) == ([1, 0, 7, 0, 8], [1, 3])


def test_truncated_slots_are_gone() -> None:
    canvas = Canvas([1], mask_id=0)
    canvas.append_slots(5)
    canvas.fill_slots([2, 5], [7, 8])
    canvas.truncate(4)
    assert (canvas.ids, canvas.holes) == ([1, 0, 7, 0], [1, 3])
    canvas.truncate(9)
    assert (len(canvas), canvas.prefix_length) == (4, 1)


def test_slots_after_end_of_sequence_are_dropped() -> None:
    seq = sequence(prompt=[EOS], max_tokens=6)
    canvas = Canvas(seq.prompt, mask_id=0)
    canvas.append_slots(6)
    canvas.fill_slots([2, 5], [7, EOS])
    assert canvas.commit_prefix(seq, [5]) and canvas.ids == [EOS, 0, 7, 0, 0, EOS]
    assert seq.tokens == []
    canvas.fill_slots([3, 4], [EOS, EOS])
    assert canvas.commit_prefix(seq, [4, 3]) and canvas.ids == [EOS, 0, 7, EOS]
    canvas.fill_slots([1], [4])
    assert not canvas.commit_prefix(seq, [1])
    assert (seq.tokens, seq.finish_reason) == ([4, 7], "stop")


def test_last_block_may_be_shorter() -> None:
    assert split_blocks(3, 11, 4) == [(3, 7), (7, 11)]
    assert split_blocks(3, 10, 4) == [(3, 7), (7, 10)]
    assert split_blocks(3, 10, 99) == [(3, 10)]


@pytest.mark.parametrize("wanted", [True, False])
def test_log_probabilities_stay_with_their_slots(wanted: bool) -> None:
    request = Request(prompt=[1, 2], max_tokens=4, logprobs=wanted, target=Target(mask_id=0))
    canvas = Canvas.from_request(request)
    canvas.append_slots(4)
    scores = {"logprob": np.array([-9.0, -0.5, -0.25, -4.0], dtype=np.float32)}
    out = Prediction(tokens=[9, 5, 6, 8], scores=scores)
    assert canvas.fill_chosen([3, 5], np.array([1, 0]), out, first=1) == [5, 3]
    assert canvas.ids[2:] == [0, 5, 0, 6]
    assert canvas.commit_until(request) and request.tokens == request.scores == []
    canvas.fill_chosen([2, 4], np.array([0]), Prediction(tokens=[7, 3], scores=scores))
    assert canvas.commit_until(request) and request.tokens == [7, 5]
    canvas.fill_chosen([4], np.array([0]), Prediction(tokens=[4], scores=scores), first=0)
    assert not canvas.commit_until(request) and request.tokens == [7, 5, 4, 6]
    assert request.scores == ([-9.0, -0.5, -9.0, -0.25] if wanted else [])


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
