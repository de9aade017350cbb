"""APD: its forwards, and the paper's statements on its coupling."""

import pytest
import torch
from torch import Tensor

from helpers import MASK, chi_square, one_hot, request_of, script
from outpace.decoding import (
    CAUSAL,
    FULL,
    Forward,
    LengthRange,
    Prediction,
    Request,
    Sample,
    Sampling,
    Target,
)
from outpace.methods import APD
from outpace.methods.apd import Mixture
from outpace.pacing.controller import PaceController

CPU = torch.device("cpu")
DRAWS = 20_000
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.2, top_p=0.95, seed=1),
    Sampling(temperature=1.0, seed=2),
    Sampling(temperature=1.5, top_k=3, seed=3),
    Sampling(temperature=0.8, top_p=0.6, top_k=5, seed=4),
]


def sequence(max_tokens: int = 6, **options: object) -> Request:
    return request_of(prompt=[1, 2, 3], max_tokens=max_tokens, mask_id=MASK, **options)


def guess(*proposed: int) -> Prediction:
    """Return a proposal of the target with matching logits."""
    return Prediction(tokens=list(proposed), logits=one_hot(list(proposed)))


def shape(forward: Forward) -> tuple[str, int, list[int], list[int]]:
    """Return model, start, rows and wanted slots of a forward."""
    wanted = list(forward.predicted_slots())
    return forward.model, forward.start, list(forward.ids), wanted


def test_propose_all_then_check_all() -> None:
    forwards = script(APD(verifier="v"), sequence(3), [guess(4, 5, 6), [5, 6]])
    assert [shape(forward) for forward in forwards] == [
        ("target", 0, [1, 2, 3, MASK, MASK, MASK], [3, 4, 5]),
        ("verifier", 0, [1, 2, 3, 4, 5], [4, 5]),
    ]
    assert [forward.pattern for forward in forwards] == [FULL, CAUSAL]


def test_leading_agreement_is_accepted() -> None:
    seq = sequence()
    forwards = script(
        APD(verifier="v", window=None),
        seq,
        [guess(4, 5, 6, 7, 8, 9), [5, 0, 7, 8, 9], guess(10, 11, 12, 13), [11, 12, 13]],
    )
    assert shape(forwards[2]) == (
        "target",
        0,
        [1, 2, 3, 4, 5, MASK, MASK, MASK, MASK],
        [5, 6, 7, 8],
    )
    assert shape(forwards[3]) == ("verifier", 5, [10, 11, 12], [6, 7, 8])
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 10, 11, 12, 13], "length")


def test_wholly_accepted_lookahead_leaves_its_last_token_to_the_verifier() -> None:
    forwards = script(
        APD(verifier="v", lookahead=3), sequence(), [guess(4, 5, 6), [5, 6], guess(7, 8, 9), [8, 9]]
    )
    assert shape(forwards[1])[2:] == ([1, 2, 3, 4, 5], [4, 5])
    assert shape(forwards[3]) == ("verifier", 5, [6, 7, 8], [7, 8])


def test_single_hole_needs_no_verifier() -> None:
    forwards = script(APD(verifier="v", lookahead=1), sequence(2), [guess(4), guess(5)])
    assert [forward.model for forward in forwards] == ["target", "target"]


@pytest.mark.parametrize(("shift", "masks"), [(1, []), (0, [MASK])])
def test_length_one_uses_no_mask(shift: int, masks: list[int]) -> None:
    pace = PaceController(LengthRange(values=[1], passes=lambda value, _: [("target", value, 1)]))
    method = APD(verifier="v", window=1, lookahead=1, least=1)
    target = Target(shift=shift, mask_id=MASK)
    request = Request(prompt=[1, 2, 3], max_tokens=2, target=target, pace=pace)
    forwards = script(method, request, [guess(4), guess(5)])
    assert [shape(forward) for forward in forwards] == [
        ("target", 0, [1, 2, 3, *masks], [3]),
        ("target", 3, [4, *masks], [4]),
    ]
    assert all(forward.pattern == FULL for forward in forwards)
    lengths = method.length_range(target, auto=True)
    assert lengths is not None and lengths.passes(1, 1)[0] == ("target", 1 + len(masks), 1)


@pytest.mark.parametrize("window", [1, 3])
def test_length_range_counts_recomputed_rows(window: int) -> None:
    method = APD(verifier="v", window=window, lookahead=3, least=1)
    said = [guess(4, 5, 6), [5, 6], guess(7, 8, 9), [8, 9]]
    forwards = script(method, sequence(), said)
    lengths = method.length_range(Target(shift=1, mask_id=MASK), auto=True)
    assert lengths is not None
    (_, rows, _), (_, checked, _) = lengths.passes(3, 3)
    assert (rows, checked) == (len(forwards[2].ids), len(forwards[3].ids))


def test_paper_coupling_checks_with_the_noise_of_the_proposal() -> None:
    sampling = Sampling(temperature=0.9, top_p=0.8, seed=3)
    answers = [guess(4, 5, 6, 7, 8, 9), [0, 0, 0, 0, 0], guess(5, 6, 7, 8, 9), [6, 7, 8, 9]]
    ways = (("gumbel", sampling, 1), ("independent", sampling, -2), ("argmax", Sampling(), 1))
    for coupling, expected, step in ways:
        forwards = script(
            APD(verifier="v", coupling=coupling), sequence(sampling=sampling), answers
        )
        proposed, checked = forwards[2].read, forwards[3].read
        assert isinstance(proposed, Sample) and isinstance(checked, Mixture)
        assert (proposed.sampling, proposed.step, proposed.keep) == (sampling, 1, True)
        assert (checked.sampling, checked.step) == (expected, step)
        assert torch.equal(checked.guess, one_hot([6, 7, 8, 9]))


def proposals(logits: Tensor, sampling: Sampling, slots: range, step: int = 0) -> Tensor:
    """Return tokens drawn by the target's read."""
    read = Sample.make_reader([Sample(sampling=sampling, step=step)], [slots], CPU)
    return read(logits, slice(0, len(slots))).tokens


def targets(
    guess: Tensor, checked: Tensor, ratio: float, sampling: Sampling, slots: range, step: int = 0
) -> Tensor:
    """Return tokens that the verifier's read draws from the mixture."""
    mixture = Mixture(guess=guess, ratio=ratio, sampling=sampling, step=step)
    return Mixture.make_reader([mixture], [slots], CPU)(checked, slice(0, len(slots))).tokens


def test_shared_noise_agrees_more_often_than_independent_noise() -> None:
    logits, sampling = random_logits(0, 2000), Sampling(temperature=0.5, seed=1)
    proposed = proposals(logits, sampling, range(2000), 3)
    shared, other = (
        (targets(logits, logits, 0.5, sampling, range(2000), step) == proposed).float().mean()
        for step in (3, -4)
    )
    chance = (logits / 0.5).softmax(-1).square().sum(-1).mean()
    assert shared == 1 and abs(other - chance) < 0.03


def random_logits(seed: int, rows: int, vocab: int = 12) -> Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_ratios_of_one_and_zero(sampling: Sampling) -> None:
    marginal, verifier = random_logits(0, 500), random_logits(1, 500)
    proposed, own = (proposals(each, sampling, range(500)) for each in (marginal, verifier))
    assert torch.equal(targets(marginal, verifier, 1.0, sampling, range(500)), proposed)
    assert torch.equal(targets(marginal, verifier, 0.0, sampling, range(500)), own)
    between = targets(marginal, verifier, 0.5, sampling, range(500))
    assert not torch.equal(between, proposed) and not torch.equal(between, own)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_rejection_rate_is_within_the_paper_bounds(ratio: float, temperature: float) -> None:
    marginal, verifier = random_logits(2, 1), random_logits(3, 1)
    sampling = Sampling(temperature=temperature, seed=7)
    slots = range(DRAWS)
    x = proposals(marginal.expand(DRAWS, -1), sampling, slots)
    y = targets(marginal.expand(DRAWS, -1), verifier.expand(DRAWS, -1), ratio, sampling, slots)
    p = (marginal / temperature).softmax(-1)
    q = (torch.lerp(verifier, marginal, ratio) / temperature).softmax(-1)
    variation = float((p - q).abs().sum()) / 2
    rejected = float((x != y).float().mean())
    error = 3 * (0.25 / DRAWS) ** 0.5
    assert variation - error <= rejected <= 2 * variation + error
    assert chi_square(y, q[0]) > 1e-3
