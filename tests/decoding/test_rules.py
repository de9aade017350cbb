"""Rules that look at earlier predictions: their reads, alone and batched, and what they record."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outpace.decoding import Prediction, Sample, Sampling
from outpace.decoding.order import within_frechet
from outpace.decoding.rules import Credit, HoleHistory, LowEntropy, Stability, start_history
from outpace.decoding.sampling import Read, Readout

CPU = torch.device("cpu")
PLAIN = Sample(scores=("confidence",))


def logits_of(*rows: list[float]) -> Tensor:
    """Return logits whose probabilities are these."""
    return torch.tensor(rows).log()


def read(reads: list[Read], slots: list[list[int]], logits: Tensor, chunk: int) -> Readout:
    """Run reads of one type in chunks."""
    reader = type(reads[0]).make_reader(reads, slots, CPU)
    parts = [
        reader(logits[begin : begin + chunk], slice(begin, min(begin + chunk, len(logits))))
        for begin in range(0, len(logits), chunk)
    ]
    scores = {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores}
    return Readout(torch.cat([part.tokens for part in parts]), scores)


def predict(history: HoleHistory, holes: list[int], logits: Tensor) -> list[bool]:
    """Read some holes alone, and record the prediction."""
    out = read([history.read(PLAIN, holes)], [holes], logits, len(holes))
    scores = {name: score.numpy().astype(np.float32) for name, score in out.scores.items()}
    return history.record(
        holes, Prediction(tokens=out.tokens.tolist(), scores=scores, logits=logits)
    ).tolist()


@pytest.mark.parametrize(
    ("confidence", "margin", "chosen"),
    [
        ([0.9, 0.9, 0.9], 0.55, [0, 1, 2]),  # 1 - 4 * 0.1 = 0.6
        ([0.9, 0.9, 0.9], 0.65, [0, 1]),
        ([0.6, 1.0, 0.9], 0.0, [1, 2, 0]),  # 1 - 0.5 - 0.4 = 0.1
        ([0.6, 1.0, 0.9], 0.25, [1, 2]),
        ([0.1, 0.2], 0.0, [1]),
        ([0.5], 1.0, [0]),
    ],
)
def test_frechet_takes_the_longest_certain_prefix(
    confidence: list[float], margin: float, chosen: list[int]
) -> None:
    assert within_frechet(np.array(confidence, dtype=np.float32), margin).tolist() == chosen


def test_confidence_needs_no_history() -> None:
    history = start_history("confidence", 0.0, 0.1)
    assert history.read(PLAIN, [3, 4]) is PLAIN
    assert history.record([3, 4], Prediction(tokens=[1, 1])).tolist() == [True, True]


def test_certain_are_slots_of_a_low_entropy() -> None:
    logits = logits_of([0.9, 0.1, 0.0], [0.5, 0.5, 0.0])
    assert predict(LowEntropy(0.33), [4, 5], logits) == [True, False]
    assert predict(LowEntropy(0.32), [4, 5], logits) == [False, False]


def test_stable_are_slots_that_hardly_changed_twice() -> None:
    history, calm, other = Stability(0.01), [0.7, 0.2, 0.1], [0.2, 0.7, 0.1]
    assert predict(history, [4, 5], logits_of(calm, calm)) == [False, False]
    assert predict(history, [4, 5], logits_of(calm, other)) == [False, False]
    assert predict(history, [4, 5], logits_of(calm, other)) == [True, False]
    assert predict(history, [5], logits_of(other)) == [True]
    assert predict(history, [4, 5], logits_of(calm, other)) == [False, True]


def test_divergence_is_that_from_the_last_prediction() -> None:
    history = Stability(1.0)
    predict(history, [7], logits_of([0.5, 0.5, 0.0]))
    out = read([history.read(PLAIN, [7])], [[7]], logits_of([0.9, 0.1, 0.0]), 1)
    expected = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    assert out.scores["divergence"].tolist() == pytest.approx([expected], abs=1e-6)


def test_credit_boosts_what_was_most_probable_before() -> None:
    history = Credit()
    predict(history, [2], logits_of([0.6, 0.3, 0.1]))
    predict(history, [2], logits_of([0.6, 0.3, 0.1]))
    logits = logits_of([0.44, 0.46, 0.1])
    out = read([history.read(PLAIN, [2])], [[2]], logits, 1)
    credit = np.array([0.6**0.2 * (0.8 + 0.64), 0.46**0.2, 0])
    fused = np.array([0.44, 0.46, 0.1]) * (1 + credit) ** 0.7
    assert out.tokens.tolist() == [0]
    assert out.scores["confidence"].tolist() == pytest.approx([fused[0] / fused.sum()], rel=1e-5)
    assert (out.scores["top_token"].item(), out.scores["top_probability"].item()) == (
        1,
        pytest.approx(0.46),
    )
    assert logits.exp().tolist()[0] == pytest.approx([0.44, 0.46, 0.1])  # unchanged


def test_log_probabilities_are_those_without_credit() -> None:
    history = Credit()
    predict(history, [2], logits_of([0.6, 0.4]))
    sample = Sample(scores=("confidence", "logprob"))
    out = read([history.read(sample, [2])], [[2]], logits_of([0.6, 0.4]), 1)
    assert out.scores["logprob"].exp().tolist() == pytest.approx([0.6])
    assert out.scores["confidence"].item() > 0.65


@pytest.mark.parametrize("rule", ["entropy", "klass", "credit"])
@pytest.mark.parametrize("chunk", [1, 3, 9])
def test_reads_are_the_same_alone_and_together(rule: str, chunk: int) -> None:
    random = torch.Generator().manual_seed(0)
    samplings = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, top_k=4)]
    reads, slots, rows, alone = [], [[3, 4, 6], [9], [1, 2, 3, 4, 5]], [], []
    for index, (sampling, holes) in enumerate(zip(samplings, slots, strict=True)):
        history = start_history(rule, 1.0, 0.1)  # type: ignore[arg-type]
        for _ in range(index):
            predict(history, [*holes, 50], torch.randn(len(holes) + 1, 11, generator=random))
        sample = Sample(sampling=sampling, scores=("confidence",), score_as_drawn=True)
        reads.append(history.read(sample, holes))
        rows.append(torch.randn(len(holes), 11, generator=random))
        alone.append(read([reads[-1]], [holes], rows[-1], len(holes)))
    together = read(reads, slots, torch.cat(rows), chunk)
    assert together.tokens.tolist() == [token for each in alone for token in each.tokens.tolist()]
    for name, score in together.scores.items():
        assert torch.equal(score, torch.cat([each.scores[name] for each in alone])), name
