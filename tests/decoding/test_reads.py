"""Every kind of read gives the same tokens and scores alone, with neighbours, and in chunks."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outpace.decoding import Sample, Sampling
from outpace.decoding.accept import Rejection
from outpace.decoding.sampling import Read, Readout
from outpace.methods.apd import Mixture
from outpace.methods.diffusion import AdjustedSample

CPU, VOCAB = torch.device("cpu"), 12


def random_logits(seed: int, rows: int) -> Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def read_in_chunks(
    reads: Sequence[Read], slots: Sequence[Sequence[int]], logits: Tensor, chunk: int
) -> Readout:
    reader = type(reads[0]).make_reader(reads, slots, CPU)
    parts = [slice(i, min(i + chunk, len(logits))) for i in range(0, len(logits), chunk)]
    read = [reader(logits[part].clone(), part) for part in parts]
    scores = {name: torch.cat([part.scores[name] for part in read]) for name in read[0].scores}
    return Readout(torch.cat([part.tokens for part in read]), scores)


def sample(index: int, holes: range, sampling: Sampling) -> Read:
    drawn = index % 2 == 0
    return Sample(sampling=sampling, step=index, scores=("confidence",), score_as_drawn=drawn)


def rejection(index: int, holes: range, sampling: Sampling) -> Read:
    drafted = tuple((index + slot) % VOCAB for slot in holes[1:])
    guess = random_logits(50 + index, len(drafted))
    return Rejection(drafted=drafted, guess=guess, sampling=sampling, scores=("logprob",))


def mixture(index: int, holes: range, sampling: Sampling) -> Read:
    guess = random_logits(50 + index, len(holes))
    return Mixture(guess=guess, ratio=index / 5, sampling=sampling, step=index)


def adjusted(index: int, holes: range, sampling: Sampling) -> Read:
    null = random_logits(50 + index, len(holes))
    kinds = (
        {},
        {"never": (3,)},
        {"last": (1, 2, 4)},
        {"guidance": 2.0, "null": null, "last": (7,)},
    )
    return AdjustedSample(sampling=sampling, scores=("confidence",), **kinds[index % 4])


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    top_p=st.sampled_from([0.5, 0.9, 1.0]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(-5, 2**40),
)
asked = st.tuples(samplings, st.integers(0, 40), st.integers(1, 6))


@pytest.mark.parametrize("make", [sample, rejection, mixture, adjusted])
@given(batch=st.lists(asked, min_size=1, max_size=5), chunk=st.integers(1, 8))
def test_neighbours_and_chunks_change_nothing(
    make: Callable[[int, range, Sampling], Read], batch: list[tuple], chunk: int
) -> None:
    slots = [range(first, first + count) for _, first, count in batch]
    reads = [make(i, slots[i], sampling) for i, (sampling, *_) in enumerate(batch)]
    rows = [random_logits(i, len(wanted)) for i, wanted in enumerate(slots)]
    together = read_in_chunks(reads, slots, torch.cat(rows), chunk)
    alone = [
        read_in_chunks([read], [wanted], own, len(own))
        for read, wanted, own in zip(reads, slots, rows, strict=True)
    ]
    assert torch.equal(together.tokens, torch.cat([each.tokens for each in alone]))
    for name in alone[0].scores:
        assert torch.equal(together.scores[name], torch.cat([each.scores[name] for each in alone]))
