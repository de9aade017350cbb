"""The samplers of diffusion models: their forwards, their end, and refused options."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import (
    MASK,
    VOCAB,
    chi_square,
    diffusion_model,
    engine_of,
    enter,
    finish,
    one_hot,
    request_of,
    runner,
    script,
    tokens,
    unshifted_model,
)
from outpace.decoding import FULL, Prediction, Request, Sample, Sampling
from outpace.engine.engine import Engine
from outpace.methods import Diffusion
from outpace.methods.diffusion import AdjustedSample
from refusal import refuses

CPU = torch.device("cpu")
EOS = 9


def sequence(max_tokens: int = 6, **options: object) -> Request:
    fields = {"eos": frozenset([EOS]), "padding": (EOS,), **options}
    return request_of(prompt=[1, 2, 3], max_tokens=max_tokens, mask_id=MASK, **fields)


def sure(*said: tuple[int, float]) -> Prediction:
    """Return tokens and their confidence for all wanted holes."""
    return Prediction(
        tokens=[token for token, _ in said],
        scores={"confidence": np.array([score for _, score in said], dtype=np.float32)},
    )


def test_best_holes_of_the_whole_canvas_are_filled() -> None:
    seq = sequence()
    forwards = script(
        Diffusion(order="confidence", steps=3, eps=0),
        seq,
        [
            sure((4, 0.1), (5, 0.7), (6, 0.2), (7, 0.9), (8, 0.3), (8, 0.4)),
            sure((4, 0.5), (6, 0.1), (8, 0.2), (7, 0.3)),
            sure((6, 0.1), (8, 0.2)),
        ],
    )
    assert [forward.ids[3:] for forward in forwards] == [
        [MASK] * 6,
        [MASK, 5, MASK, 7, MASK, MASK],
        [4, 5, MASK, 7, MASK, 7],
    ]
    assert [list(forward.predict) for forward in forwards] == [[*range(3, 9)], [3, 5, 7, 8], [5, 7]]
    assert all((forward.start, forward.pattern) == (0, FULL) for forward in forwards)
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 6, 7, 8, 7], "length")


def test_an_answer_ends_once_all_before_its_end_is_filled() -> None:
    seq = sequence()
    forwards = script(
        Diffusion(order="confidence", steps=6),
        seq,
        [
            sure((4, 0.1), (5, 0.7), (6, 0.2), (EOS, 0.9), (8, 0.3), (8, 0.4)),
            sure((4, 0.5), (5, 0.6), (EOS, 0.7)),
            sure((4, 0.5), (5, 0.6)),
            sure((4, 0.5)),
        ],
    )
    assert [len(forward.ids) for forward in forwards] == [9, 7, 6, 6]
    assert (seq.tokens, seq.finish_reason) == ([4, 5], "stop")


def test_steps_that_fill_nothing_take_no_forward() -> None:
    answers = [sure(*[(4, 0.5)] * count) for count in (4, 3, 2)]
    forwards = script(Diffusion(order="confidence", steps=8, eps=1e-3), sequence(4), answers)
    assert [forward.read.step for forward in forwards] == [5, 6, 7]


def test_defaults_come_from_the_model() -> None:
    native = {"order": "margin", "block": 2, "eps": 0.05, "score_as_drawn": True}
    answers = [
        Prediction(tokens=[4] * n, scores={"margin": np.ones(n, np.float32)}) for n in (2, 2)
    ]
    forwards = script(Diffusion(steps=6), sequence(4, **native), answers)
    assert [list(forward.predict) for forward in forwards] == [[3, 4], [5, 6]]
    assert [forward.read.step for forward in forwards] == [2, 5]
    assert {(f.read.scores, f.read.score_as_drawn) for f in forwards} == {(("margin",), True)}


def test_random_orders_differ_by_seed_and_not_by_neighbours(engine: Engine) -> None:
    for order in ("random", "origin"):
        method = Diffusion(order=order, steps=4)
        jobs = [submit(engine, method, Sampling(seed=seed)) for seed in (1, 2, 1)]
        finish(engine)
        ids = [tokens(job) for job in jobs]
        assert ids[0] == ids[2] != ids[1]
        assert all(len(each) == 12 for each in ids)


def test_drawn_order_is_the_best_one_at_a_low_temperature(engine: Engine) -> None:
    orders = [Diffusion(order="entropy", steps=6, order_temperature=t) for t in (0, 1e-4, 10)]
    jobs = [submit(engine, method, Sampling()) for method in orders]
    finish(engine)
    best, cold, hot = (tokens(job) for job in jobs)
    assert best == cold != hot


DIFFUSION, UNSHIFTED = diffusion_model(seed=1), unshifted_model(seed=1)
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(("shifted", DIFFUSION), ("unshifted", UNSHIFTED), slots=8192)


def submit(engine: Engine, method: Diffusion, sampling: Sampling, name: str = "shifted"):
    runners = {"target": runner(engine, name)}
    return enter(
        engine, method, PROMPT, runners=runners, max_tokens=12, sampling=sampling, eos=frozenset()
    )


def test_guidance_runs_a_prompt_of_masks_first() -> None:
    seq = sequence(2, null_prompt=True)
    null = one_hot([4, 5])
    answers = [
        Prediction(tokens=[4, 5], logits=null),
        sure((6, 0.9), (7, 0.1)),
        Prediction(tokens=[5], logits=null[1:]),
        sure((7, 0.1)),
    ]
    forwards = script(Diffusion(guidance=1.5), seq, answers)
    assert [forward.ids for forward in forwards] == [
        [MASK] * 5,
        [1, 2, 3, MASK, MASK],
        [MASK, MASK, MASK, 6, MASK],
        [1, 2, 3, 6, MASK],
    ]
    assert forwards[0].read == Sample(keep=True)
    read = forwards[1].read
    assert (
        isinstance(read, AdjustedSample) and read.guidance == 1.5 and read.scores == ("confidence",)
    )
    assert torch.equal(read.null, null)


def test_ends_may_come_last_or_never() -> None:
    for ends, never, last in (("never", (7,), ()), ("last", (), (7, 8))):
        seq = sequence(eos=frozenset([7, 8]), padding=(7,))
        read = next(Diffusion(ends=ends).decode(seq)).read
        assert isinstance(read, AdjustedSample)
        assert (read.never, tuple(sorted(read.last))) == (never, last)
    assert type(next(Diffusion().decode(sequence())).read) is Sample


def moved(logits: Tensor, slots: range, **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens and scores of one read of adjusted logits."""
    read = AdjustedSample(scores=("confidence", "entropy", "margin"), **options)
    out = AdjustedSample.make_reader([read], [slots], CPU)(logits, slice(0, len(slots)))
    return out.tokens, out.scores


def random_logits(seed: int, rows: int) -> Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_guided_logits_are_those_of_the_paper() -> None:
    logits, null = random_logits(0, 50), random_logits(1, 50)
    for guidance in (0.0, 0.7, 3.0):
        said, scores = moved(logits, range(50), null=null, guidance=guidance)
        expected = null + (1 + guidance) * (logits - null)
        assert torch.equal(said, expected.argmax(-1))
        law = expected.softmax(-1)
        torch.testing.assert_close(scores["confidence"], law.max(-1).values)
    assert torch.equal(logits, random_logits(0, 50))


def test_holes_that_end_the_answer_rank_last() -> None:
    logits = random_logits(2, 200)
    plain, _ = moved(logits, range(200))
    said, scores = moved(logits, range(200), last=(4, 5))
    ended = (said == 4) | (said == 5)
    assert torch.equal(said, plain) and 0 < int(ended.sum()) < 100
    for name, score in scores.items():
        worse = score if name == "entropy" else -score
        assert bool((worse[ended] == torch.inf).all())
        assert not bool(worse[~ended].isinf().any())
    without = logits.clone()
    without[:, [4, 5]] = -torch.inf
    expected = without.softmax(-1).max(-1).values
    torch.testing.assert_close(scores["confidence"][~ended], expected[~ended])


def test_banned_tokens_are_never_drawn() -> None:
    logits = random_logits(3, 1).expand(6000, -1)
    sampling = Sampling(temperature=1.0, seed=5)
    said, _ = moved(logits, range(6000), sampling=sampling, never=(0, 1, 2))
    law = logits[0].clone()
    law[:3] = -torch.inf
    assert chi_square(said, law.softmax(-1)) > 1e-3


def test_guidance_needs_a_model_that_was_trained_for_it() -> None:
    with refuses("guidance"):
        Diffusion(guidance=0.5).check_request(sequence())


@pytest.mark.parametrize(
    ("steps", "block", "max_tokens", "counts"),
    [
        (10, 8, 32, [3, 3, 2, 3, 3, 2, 4, 4, 4, 4]),  # blocks take 3, 3, 2 and 2 steps
        (3, 8, 32, [8, 8, 8, 8]),  # one step per block at least
        (4, 8, 20, [4, 4, 8, 4]),  # the last block has 4 tokens
        (4, 33, 6, [2, 2, 1, 1]),  # the only block has 6 tokens
        (10**30, 33, 3, [1, 1, 1]),
    ],
)
def test_blocks_share_steps(steps: int, block: int, max_tokens: int, counts: list[int]) -> None:
    method = Diffusion(order="left_to_right", steps=steps, block=block, eps=0.0)
    seq, filled = sequence(max_tokens), []
    decoding = method.decode(seq)
    forward = next(decoding)
    while seq.finish_reason is None:
        before = len(seq)
        with suppress(StopIteration):
            forward = decoding.send(Prediction(tokens=[5] * len(forward.predict)))
        filled.append(len(seq) - before)
    assert filled == counts
