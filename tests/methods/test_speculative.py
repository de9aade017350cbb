"""Speculative decoding, forward by forward."""

import torch

from helpers import one_hot, request_of, script
from outpace.decoding import Forward, Prediction, Request, Sample, Sampling
from outpace.decoding.accept import Rejection
from outpace.methods import Speculative

WARM = Sampling(temperature=1.0, seed=7)


def sequence(**options) -> Request:
    return request_of(**{"prompt": [5, 6, 7], "max_tokens": 12, **options})


def fed(forwards: list[Forward]) -> list[tuple[str, int, list[int]]]:
    """Return model, first slot and rows of each forward."""
    return [(forward.model, forward.start, list(forward.ids)) for forward in forwards]


def test_drafts_are_accepted_up_to_the_first_mismatch() -> None:
    seq = sequence(max_tokens=7)
    answers = [[8], [9], [10], [11], [9, 10, 12, 13], [20], [14], [20, 15, 16]]
    forwards = script(Speculative(draft="", tokens=3), seq, answers + [[16]])
    assert seq.tokens == [8, 9, 10, 12, 20, 15, 16]
    assert fed(forwards) == [
        ("target", 0, [5, 6, 7]),
        ("draft", 0, [5, 6, 7, 8]),
        ("draft", 4, [9]),
        ("draft", 5, [10]),
        ("target", 3, [8, 9, 10, 11]),
        ("draft", 6, [12]),
        ("draft", 7, [20]),
        ("target", 6, [12, 20, 14]),
        ("target", 8, [15]),
    ]
    assert list(forwards[4].predicted_slots()) == [4, 5, 6, 7]
    assert list(forwards[7].predicted_slots()) == [7, 8, 9]


def test_all_drafts_accepted_add_one_token() -> None:
    seq = sequence(eos=frozenset([12]))
    answers = [[8], [9], [10], [9, 10, 11], [12], [13], [12, 13, 14]]
    forwards = script(Speculative(draft="", tokens=2), seq, answers)
    assert (seq.tokens, seq.finish_reason) == ([8, 9, 10, 11], "stop")
    assert fed(forwards)[4:] == [
        ("draft", 5, [10, 11]),
        ("draft", 7, [12]),
        ("target", 6, [11, 12, 13]),
    ]


def test_match_reads_all_with_the_noise_of_the_request() -> None:
    seq = sequence(max_tokens=3, sampling=WARM)
    forwards = script(Speculative(draft="", tokens=1), seq, [[8], [9], [9, 10]])
    assert [forward.read for forward in forwards] == [Sample(sampling=WARM)] * 3


def test_rejection_drafts_with_separate_noise() -> None:
    seq = sequence(max_tokens=4, sampling=WARM)
    first, second = one_hot([9]), one_hot([10])
    answers = [
        [8],
        Prediction(tokens=[9], logits=first),
        Prediction(tokens=[10], logits=second),
        [9, 10, 11],
    ]
    method = Speculative(draft="", tokens=2, verify="rejection")
    *_, draft, target = script(method, seq, answers)
    assert draft.read == Sample(sampling=WARM, step=1, keep=True)
    assert isinstance(target.read, Rejection)
    assert target.read.drafted == (9, 10)
    assert torch.equal(target.read.guess, torch.cat((first, second)))
