"""A pass over many forwards: how they are split; written, visible and predicted slots."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import MASK, VOCAB, causal_model, diffusion_model, feature_draft, feeds, run, whole
from literal import Memory, answer
from outpace.decoding import CAUSAL, FULL, Forward, Sample, Sampling
from outpace.decoding.accept import Rejection
from outpace.decoding.processor import BANNED_LOGIT, VocabularyLimit
from outpace.engine.cache import PAGE_SIZE, PageTable
from outpace.engine.pack import ScheduledForward
from outpace.engine.runner import Runner
from outpace.methods.apd import Mixture
from outpace.models.draft import DFlashDraft
from outpace.models.transformer import Transformer

CAUSAL_MODEL, DIFFUSION_MODEL = causal_model(seed=1), diffusion_model(seed=1)
SLIDING = ["sliding_attention", "full_attention"]
DRAFTS = [
    feature_draft(CAUSAL_MODEL),
    feature_draft(CAUSAL_MODEL, layer_types=SLIDING, sliding_window=4),
    feature_draft(CAUSAL_MODEL, layer_types=SLIDING, sliding_window=3, is_causal=False),
    feature_draft(CAUSAL_MODEL, is_causal=True),
]
ROOM = 40
KEPT = Sample(keep=True)


def table_of(runner: Runner, slots: int = ROOM) -> PageTable:
    table = runner.cache.reserve(slots)
    assert table is not None
    return table


def new_runner(model: Transformer | DFlashDraft = CAUSAL_MODEL, **options: int) -> Runner:
    return Runner("tiny", model, slots=32 * PAGE_SIZE, **options)


@st.composite
def forward_runs(draw) -> list[Forward]:
    """Generate forwards of one sequence with valid writes and views."""
    forwards: list[Forward] = []
    written = 0
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, min(written, ROOM - 6)))
        lengths = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
        rows = sum(lengths)
        pattern = draw(st.sampled_from([CAUSAL, FULL, lengths]))
        written = max(written, start + rows)
        reach = draw(st.sampled_from([None, start + rows, written]))
        first = draw(st.integers(0, 50))
        forwards.append(
            Forward(
                ids=draw(st.lists(st.integers(0, VOCAB - 1), min_size=rows, max_size=rows)),
                start=start,
                pattern=pattern,
                visible_end=reach,
                positions=draw(st.sampled_from([None, list(range(first, first + rows))])),
                predict=range(start + 1, start + rows + 1),
                read=KEPT,
            )
        )
    return forwards


def check_literal(
    runner: Runner, model: Transformer | DFlashDraft, runs: list[list[Forward]], feature_size: int
) -> None:
    """Compare runs of several sequences with those of the literal implementation."""
    tables, memories = [table_of(runner) for _ in runs], [Memory(model) for _ in runs]
    for turn in range(max(map(len, runs))):
        active = [index for index, run in enumerate(runs) if turn < len(run)]
        forwards = [runs[index][turn] for index in active]
        limits = {"vocab": VOCAB, "length": 1000, "slots": ROOM, "feature_size": feature_size}
        for index, forward in zip(active, forwards, strict=True):
            forward.check_bounds(written=tables[index].written, **limits)
        predictions = run(runner, forwards, [tables[index] for index in active])
        for index, forward, prediction in zip(active, forwards, predictions, strict=True):
            expected = answer(forward, memories[index])
            torch.testing.assert_close(prediction.logits, expected.logits, atol=1e-4, rtol=1e-4)


@given(st.lists(forward_runs(), min_size=1, max_size=3))
def test_any_forwards_equal_the_literal_implementation(runs: list[list[Forward]]) -> None:
    check_literal(new_runner(read_rows=4), CAUSAL_MODEL, runs, 0)


@st.composite
def draft_runs(draw) -> list[Forward]:
    """Generate blocks of one sequence after features, as a draft runs them."""
    forwards: list[Forward] = []
    ready = 0  # slots that hold features
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0 if ready else 1, 5))
        seed = draw(st.integers(0, 99))
        context = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
        ready += count
        rows = draw(st.integers(1, 6))
        forwards.append(
            Forward(
                ids=[3] + [MASK] * (rows - 1),
                start=ready,
                pattern=FULL,
                predict=range(ready, ready + rows),
                read=KEPT,
                context=context if count else None,
            )
        )
    return forwards


@pytest.mark.parametrize("draft", DRAFTS, ids=["full", "sliding", "sliding and full", "causal"])
@given(runs=st.lists(draft_runs(), min_size=1, max_size=3))
def test_blocks_after_features_equal_the_literal(
    draft: DFlashDraft, runs: list[list[Forward]]
) -> None:
    check_literal(new_runner(draft), draft, runs, 64)


def test_each_forward_gets_the_features_that_it_wants() -> None:
    runner = new_runner()
    layers = [(0, 1), (), (1,), (1, 0), (0, 1)]
    forwards = [Forward(ids=[3 + n, 4, 5][: 1 + n % 3], start=0) for n in range(5)]
    out = run(runner, forwards, [table_of(runner) for _ in forwards], layers)
    assert out[1].features is None
    for forward, wanted, prediction in zip(forwards, layers, out, strict=True):
        expected = answer(forward, Memory(CAUSAL_MODEL), wanted)
        assert prediction.tokens == expected.tokens
        if wanted:
            assert prediction.features.shape == (len(forward.ids), 32 * len(wanted))
            torch.testing.assert_close(prediction.features, expected.features, atol=1e-4, rtol=1e-4)
    assert run(runner, forwards, [table_of(runner) for _ in forwards])[0].features is None


def test_predictions_come_back_in_the_order_of_the_forwards() -> None:
    runner = new_runner()
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    reads = [
        Sample(keep=True),
        Sample(sampling=Sampling(temperature=0.5, seed=1), scores=("confidence",)),
        Sample(scores=("entropy", "margin")),
    ]
    forwards = [
        Forward(ids=ids, start=0, read=read) for ids, read in zip(prompts, reads, strict=True)
    ]
    forwards.insert(1, Forward(ids=[9], start=0, predict=()))
    kept, nothing, confident, scored = run(runner, forwards, [table_of(runner) for _ in forwards])
    logits = [whole(CAUSAL_MODEL, ids, causal=True)[-1] for ids in prompts]
    assert nothing.tokens == []
    assert kept.tokens == [int(logits[0].argmax())]
    assert kept.logits is not None and torch.allclose(kept.logits[0], logits[0], atol=1e-4)
    assert kept.scores == {}
    assert confident.scores["confidence"] == pytest.approx(
        [float(logits[1].softmax(-1)[confident.tokens[0]])], abs=1e-4
    )
    assert confident.logits is None and confident.scores.keys() == {"confidence"}
    law = logits[2].softmax(-1)
    assert scored.scores["entropy"] == pytest.approx([float(-(law * law.log()).sum())], abs=1e-3)
    best = law.topk(2).values
    assert scored.scores["margin"] == pytest.approx([float(best[0] - best[1])], abs=1e-4)


def test_reads_of_different_types_share_a_pass() -> None:
    runner = new_runner(vocab=VOCAB - 1)
    opposite = torch.full((2, VOCAB), 0.0).index_fill(1, torch.tensor([11]), 1e6)
    mixture = Mixture(guess=opposite, ratio=0.5, sampling=Sampling(), step=0)
    forwards = [
        Forward(ids=[1, 2], start=0, predict=[1, 2], read=read)
        for read in (KEPT, mixture, Sample(), replace(mixture, ratio=0.0))
    ]
    first, mixed, plain, own = run(runner, forwards, [table_of(runner) for _ in forwards])
    logits = whole(CAUSAL_MODEL, [1, 2], causal=True)[:, : VOCAB - 1]
    assert mixed.tokens == [11, 11]
    assert first.tokens == plain.tokens == own.tokens == logits.argmax(-1).tolist() != [11, 11]
    assert first.logits is not None and torch.allclose(first.logits, logits, atol=1e-4)


@pytest.mark.parametrize("read_rows", [1, 2, 5])
def test_reading_few_rows_at_a_time_changes_nothing(read_rows: int) -> None:
    read = Sample(
        sampling=Sampling(temperature=1.0, seed=4), keep=True, scores=("confidence", "entropy")
    )
    forwards = [
        Forward(ids=list(range(rows)), start=0, pattern=FULL, predict=range(1, rows + 1), read=read)
        for rows in (3, 1, 6)
    ]
    results = []
    for size in (256, read_rows):
        runner = new_runner(DIFFUSION_MODEL, read_rows=size)
        results.append(run(runner, forwards, [table_of(runner) for _ in forwards]))
    for one, many in zip(*results, strict=True):
        assert one.tokens == many.tokens
        torch.testing.assert_close(one.logits, many.logits)
        assert one.scores["confidence"] == pytest.approx(many.scores["confidence"], abs=1e-5)
        assert one.scores["entropy"] == pytest.approx(many.scores["entropy"], abs=1e-5)


def test_mask_is_never_generated() -> None:
    model = diffusion_model(seed=1)
    model.unembedding.weight[MASK] = 100 * model.unembedding.weight[:MASK].sum(0)
    runner = new_runner(model)
    forward = Forward(ids=[1, MASK, MASK], start=0, pattern=FULL, predict=[1, 2, 3], read=KEPT)
    (prediction,) = run(runner, [forward], [table_of(runner)])
    assert MASK not in prediction.tokens
    assert prediction.logits is not None
    assert prediction.logits[:, MASK].tolist() == pytest.approx([BANNED_LOGIT] * 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "read",
    [
        Sample(),
        Sample(sampling=Sampling(temperature=1.0, top_p=0.9), scores=("entropy",)),
        Rejection(drafted=(3,), guess=torch.zeros(1, VOCAB), sampling=Sampling(temperature=1)),
    ],
    ids=["greedy", "sampled", "rejection"],
)
def test_nan_logits_raise(bad: float, read: Sample) -> None:
    runner = new_runner()
    head = runner.compute_logits

    def spoiled(hidden: Tensor, *more: Any) -> Tensor:
        logits = head(hidden, *more)
        logits[0, slice(None) if bad == -torch.inf else 5] = bad
        return logits

    runner.compute_logits = spoiled  # type: ignore[method-assign]
    forward = Forward(ids=[1, 2], start=0, predict=[1, 2], read=read)
    with pytest.raises(ArithmeticError, match="finite"):
        run(runner, [forward], [table_of(runner)])


@pytest.mark.parametrize("read_rows", [1, 3, 256])
def test_processors_change_the_rows_of_their_own_request(read_rows: int) -> None:
    runner, seen = new_runner(read_rows=read_rows), []

    def only(logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        seen.extend(slots)
        logits[:, 4] = 1e6

    forwards = [Forward(ids=[1, 2, 3], start=0, predict=[1, 2, 3]) for _ in range(4)]
    fed = feeds(runner, forwards, [table_of(runner) for _ in forwards])
    fed[1].processors, fed[3].processors = (only,), (VocabularyLimit(5),)
    free, first, _, short = runner.run_pass(fed)
    assert first.tokens == [4, 4, 4] and set(short.tokens) <= set(range(5))
    assert free.tokens == whole(CAUSAL_MODEL, [1, 2, 3], causal=True).argmax(-1).tolist()
    assert seen == [1, 2, 3]


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    runner = new_runner()
    sampling = Sampling(temperature=0.5, top_k=3, seed=1)
    for drawn in (False, True):
        read = Sample(sampling=sampling, scores=("confidence", "logprob"), score_as_drawn=drawn)
        (out,) = run(runner, [Forward(ids=[1, 2], start=0, read=read)], [table_of(runner)])
        law = whole(CAUSAL_MODEL, [1, 2], causal=True)[-1].log_softmax(-1)
        assert out.logprobs == pytest.approx([float(law[out.tokens[0]])], abs=1e-4)
        assert (float(np.log(out.scores["confidence"][0])) == pytest.approx(out.logprobs[0])) == (
            not drawn
        )


# Scheduled forwards.

WIDE = Runner("wide", causal_model(vocab_size=VOCAB + 100), slots=512)


def feed_of(forward: Forward, written: int = 100) -> ScheduledForward:
    table = WIDE.reserve(160)
    assert table is not None
    table.written = written
    try:
        return feeds(WIDE, [forward], [table])[0]
    finally:
        WIDE.release(table)


@given(st.integers(1, 12), st.booleans(), st.data())
def test_split_forward_is_equal_in_two_parts(rows: int, moved: bool, data: st.DataObject) -> None:
    ids = list(range(rows))
    places = [2 * row + 5 for row in ids] if moved else None
    wanted = sorted(data.draw(st.sets(st.integers(4, 3 + rows), max_size=3)))
    whole = feed_of(Forward(ids=ids, start=3, positions=places, predict=wanted))
    cut = min(data.draw(st.integers(1, 12)), whole.splittable_rows)
    assert 0 <= cut < rows
    assert not wanted or cut <= wanted[0] - 4
    if cut:
        head, tail = whole.split_at(cut)
        assert head.ids + tail.ids == ids
        assert (head.start, head.end, tail.end) == (3, tail.start, whole.end)
        assert (head.num_visible, tail.num_visible) == (head.end, whole.num_visible)
        assert places is None or [*head.positions, *tail.positions] == places
        assert list(head.slots) == head.rows == [] and list(tail.slots) == wanted
        assert [tail.start + row for row in tail.rows] == [slot - 1 for slot in wanted]


def test_forwards_are_split_where_no_row_sees_across() -> None:
    def parts(most: int, **change: Any) -> int:
        return feed_of(Forward(ids=[1] * 6, start=3, **change)).find_split(most)

    assert [parts(most) for most in (0, 1, 5, 9)] == [0, 1, 5, 5]
    assert [parts(most, pattern=(2, 3, 1)) for most in (1, 2, 4, 9)] == [0, 2, 2, 5]
    assert parts(9, pattern=(2, 3, 1), predict=[7]) == 2
    assert parts(9, pattern=(4, 2), predict=[6]) == parts(9, pattern=FULL) == 0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2), st.data())
def test_split_blocks_keep_their_view(blocks: list[int], more: int, data: st.DataObject) -> None:
    reach = 3 + sum(blocks) + more if more else None
    forward = Forward(ids=[1] * sum(blocks), start=3, pattern=tuple(blocks), visible_end=reach)
    whole = feed_of(forward)
    if not whole.splittable_rows:
        return
    cut = data.draw(st.integers(1, whole.splittable_rows))
    head, tail = whole.split_at(cut)
    assert tail.visible_ends() == whole.visible_ends()[cut:] and len(tail.ids) == sum(tail.pattern)
    if apart := whole.find_split(cut):
        head, tail = whole.split_at(apart)
        assert head.visible_ends() + tail.visible_ends() == whole.visible_ends()
        assert head.num_visible == head.end
