"""DFlash, forward by forward."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import one_hot, request_of, script
from outpace.decoding import FULL, GREEDY, Forward, Prediction, Request, Sample, Sampling
from outpace.decoding.accept import Rejection
from outpace.methods import DFlash
from refusal import refuses

MASK = 99


def sequence(**options) -> Request:
    return request_of(
        **{"prompt": [5, 6, 7], "max_tokens": 12, "mask_id": MASK, "block": 4} | options
    )


def seen(tokens: list[int], rows: int) -> Prediction:
    return Prediction(tokens=tokens, features=torch.arange(float(rows))[:, None])


def column(context: Tensor | None) -> list[float]:
    assert context is not None
    return context[:, 0].tolist()


def drafted(seq: Request) -> list[Forward]:
    """Run cycles of three drafts, of which the target accepts two, all, none and two."""
    answers = [
        seen([8], 3),
        [9, 10, 11],
        seen([9, 10, 20, 21], 4),
        [22, 23, 24],
        seen([22, 23, 24, 25], 4),
        [26, 27, 28],
        seen([30, 31, 32, 33], 4),
        [31, 32],
        seen([31, 32, 34], 3),
    ]
    forwards = script(DFlash(draft="", tokens=3), seq, answers)
    assert seq.tokens == [8, 9, 10, 20, 22, 23, 24, 25, 30, 31, 32, 34]
    return forwards


def test_block_of_masks_and_features_of_accepted_rows() -> None:
    seq = sequence()
    forwards = drafted(seq)
    drafts, checks = forwards[1::2], forwards[2::2]
    assert [(f.start, list(f.ids)) for f in drafts] == [
        (3, [8, MASK, MASK, MASK]),
        (6, [20, MASK, MASK, MASK]),
        (10, [25, MASK, MASK, MASK]),
        (11, [30, MASK, MASK]),  # the remaining budget
    ]
    assert [column(f.context) for f in drafts] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3], [0]]
    assert all(f.pattern == FULL and f.model == "draft" and f.features_for is None for f in drafts)
    assert [list(f.predicted_slots()) for f in drafts[:2]] == [[4, 5, 6], [7, 8, 9]]
    assert [(f.start, list(f.ids)) for f in checks[:2]] == [
        (3, [8, 9, 10, 11]),
        (6, [20, 22, 23, 24]),
    ]
    assert [list(f.predicted_slots()) for f in checks[:2]] == [[4, 5, 6, 7], [7, 8, 9, 10]]
    assert all(f.features_for == "draft" and f.context is None for f in [forwards[0], *checks])


def test_match_samples_the_target_and_not_the_draft() -> None:
    warm = Sampling(temperature=1.0, seed=7)
    answers = [seen([8], 3), [9, 10, 11], seen([9, 10, 11, 12], 4)]
    seq = sequence(max_tokens=5, sampling=warm)
    first, draft, check = script(DFlash(draft="", tokens=3), seq, answers)
    assert first.read == check.read == Sample(sampling=warm)
    assert draft.read == GREEDY


def test_rejection_takes_the_logits_of_the_block() -> None:
    warm = Sampling(temperature=1.0, seed=7)
    guess = one_hot([9, 10, 11])
    answers = [seen([8], 3), Prediction(tokens=[9, 10, 11], logits=guess), seen([9, 10, 11, 12], 4)]
    method = DFlash(draft="", tokens=3, verify="rejection")
    _, draft, target = script(method, sequence(max_tokens=5, sampling=warm), answers)
    assert draft.read == Sample(sampling=warm, step=1, keep=True)
    assert isinstance(target.read, Rejection)
    assert target.read.drafted == (9, 10, 11)
    assert torch.equal(target.read.guess, guess)


def test_drafts_end_before_an_uncertain_one() -> None:
    scores = {"acceptance": np.array([0.9, 0.5, 0.4, 0.9], dtype=np.float32)}
    guess = one_hot([9, 10, 11, 12])
    sure = Prediction(tokens=[9, 10, 11, 12], scores=scores, logits=guess)
    doubt = {"acceptance": np.array([0.1], dtype=np.float32)}
    unsure = Prediction(tokens=[20], scores=doubt, logits=guess[:1])
    answers = [seen([8], 3), sure, seen([9, 10, 13], 3), unsure, seen([21], 1), seen([22], 1)]
    method = DFlash(draft="", tokens=4, verify="rejection", confidence_threshold=0.5)
    options = {"drafts_from_last": True, "predicts_acceptance": True, "max_tokens": 6}
    seq = sequence(sampling=Sampling(temperature=1.0), **options)
    forwards = script(method, seq, answers)
    assert [list(forward.ids) for forward in forwards[1:]] == [
        [8, MASK, MASK, MASK],
        [8, 9, 10],
        [13, MASK],
        [13],
        [21],
    ]
    assert [list(forward.predicted_slots()) for forward in forwards[1:4:2]] == [[4, 5, 6, 7], [7]]
    assert forwards[1].read == replace(seq.sample(1, keep=True), scores=("acceptance",))
    assert isinstance(forwards[2].read, Rejection) and torch.equal(
        forwards[2].read.guess, guess[:2]
    )
    assert forwards[4].read == seq.sample()


def test_block_beyond_the_trained_one_warns() -> None:
    with pytest.warns(UserWarning, match="block 5"):
        script(DFlash(draft="near", block=5), sequence(max_tokens=1), [seen([8], 3)])


def test_options_need_a_draft_that_supports_them() -> None:
    with refuses("confidence_threshold"):
        DFlash(draft="", confidence_threshold=0.5).check_request(sequence())


def test_fused_draft_runs_the_text_too() -> None:
    seq = sequence(adds_features=True)
    forwards = drafted(seq)
    drafts = forwards[1::2]
    assert [(f.start, list(f.ids), f.pattern) for f in drafts] == [
        (0, [5, 6, 7, 8, MASK, MASK, MASK], (1, 1, 1, 4)),
        (3, [8, 9, 10, 20, MASK, MASK, MASK], (1, 1, 1, 4)),
        (6, [20, 22, 23, 24, 25, MASK, MASK, MASK], (1, 1, 1, 1, 4)),
        (10, [25, 30, MASK, MASK], (1, 3)),
    ]
    assert [column(f.features) for f in drafts] == [
        [0, 1, 2, 0, 0, 0, 0],
        [0, 1, 2, 0, 0, 0, 0],
        [0, 1, 2, 3, 0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert [list(f.predicted_slots()) for f in drafts[:2]] == [[4, 5, 6], [7, 8, 9]]
    assert all(f.model == "draft" and f.context is None for f in drafts)
