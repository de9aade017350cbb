"""Block diffusion, driven by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from blocks import predicted, shape
from helpers import (
    MASK,
    as_it_stands,
    block_model,
    engine_of,
    enter,
    finish,
    request_of,
    runner,
    script,
    tokens,
)
from outpace.decoding import Prediction, Request, Sampling, Tree
from outpace.decoding.processor import Penalties
from outpace.methods import BlockDiffusion
from refusal import refuses

EOS = 0


def sequence(max_tokens: int = 6, **fields: Any) -> Request:
    given = {"shift": 0, "block": 4, "is_block_causal": True, **fields}
    prompt = given.pop("prompt", [1, 2, 3, 1, 2, 3])
    return request_of(
        prompt=prompt, max_tokens=max_tokens, mask_id=MASK, eos=frozenset([EOS]), **given
    )


def test_full_block_runs_once_more_with_the_next() -> None:
    seq = sequence()
    forwards = script(
        BlockDiffusion(),
        seq,
        [
            predicted("45", "-*"),
            predicted("6", "-"),
            predicted("4567", "+--+"),
            predicted("89", "++"),
        ],
    )
    assert [shape(forward) for forward in forwards] == [
        (0, "123123__", (4, 4), [6, 7]),
        (4, "23_5", (4,), [6]),
        (4, "2365____", (4, 4), [8, 9, 10, 11]),
        (8, "4__7", (4,), [9, 10]),
    ]
    assert (seq.tokens, seq.finish_reason) == ([6, 5, 4, 8, 9, 7], "length")
    short = sequence(4)
    forwards = script(BlockDiffusion(), short, [predicted("45", "++"), predicted("67", "++")])
    assert shape(forwards[1]) == (4, "2345__", (4, 2), [8, 9])


def test_shifted_model_predicts_first_hole_alone() -> None:
    seq = sequence(8, shift=1, prompt=[1, 2, 3, 1])
    answers = [
        predicted("5", "-"),
        predicted("678", "-*-"),
        predicted("68", "++"),
        predicted("9", "-"),
    ]
    decoding = BlockDiffusion().decode(seq)
    forwards = [next(decoding)]
    forwards += [decoding.send(answer) for answer in answers]
    assert [shape(forward) for forward in forwards] == [
        (0, "1231", (4,), [4]),
        (4, "5___", (4,), [5, 6, 7]),
        (4, "5_7_", (4,), [5, 7]),
        (4, "5678", (4,), [8]),
        (8, "9___", (4,), [9, 10, 11]),
    ]
    assert [list(forward.predicted_rows(1)) for forward in forwards[:2]] == [[3], [0, 1, 2]]


def test_quotas_of_steps() -> None:
    whole = sequence(8, block=8, prompt=[1] * 8)
    answers = [
        predicted("11111111", "-*+-----"),
        predicted("22222", "-----"),
        predicted("33", "--"),
    ]
    script(BlockDiffusion(threshold=None, steps=3), whole, answers)
    assert whole.tokens == [1, 1, 1, 2, 2, 2, 3, 3]
    # All holes above the threshold are filled, if they reach the quota.
    many = sequence(8, block=8, prompt=[1] * 8)
    answers = [predicted("11111111", "+-+-+-+-"), predicted("2222", "+---"), predicted("3", "-")]
    script(BlockDiffusion(steps=3), many, answers)
    assert many.tokens == [1, 2, 1, 2, 1, 2, 1, 3]
    few = sequence(2)
    script(BlockDiffusion(threshold=None, steps=1), few, [predicted("45", "--")])
    assert few.tokens == [4, 5]


def test_an_answer_ends_with_its_last_token_or_with_the_block() -> None:
    answers = [predicted("4507", "--+-"), predicted("456", "*--"), predicted("56", "*-")]
    seq = sequence(8, prompt=[1] * 4)
    script(BlockDiffusion(), seq, answers)
    assert (seq.tokens, seq.finish_reason) == ([4, 5], "stop")
    seq = sequence(8, prompt=[1] * 4)
    script(BlockDiffusion(canvas=True), seq, [*answers, predicted("6", "-")])
    assert (seq.tokens, seq.finish_reason) == ([4, 5], "stop")
    assert list(seq.canvas) == [1, 1, 1, 1, 4, 5, 0, 6]


def test_one_forward_verifies_and_drafts_where_rows_predict_the_next_slot() -> None:
    seq = sequence(9, shift=1, prompt=[1, 2, 3])
    answers = [
        predicted("4567", "-++-"),
        predicted("582345", "--++++"),
        predicted("6789", "-+++"),
        predicted("78945", "++++*"),
        predicted("6", "-"),
    ]
    forwards = script(BlockDiffusion(verify=True), seq, answers)
    assert [shape(forward) for forward in forwards] == [
        (0, "123___", (1, 1, 1, 3), [3, 4, 5, 6]),
        (3, "456___", (1, 1, 1, 3), [4, 5, 6, 7, 8, 9]),
        (5, "8___", (1, 3), [6, 7, 8, 9]),
        (6, "6789_", (1, 1, 1, 1, 1), [7, 8, 9, 10, 11]),
        (10, "4", (1,), [11]),
    ]
    assert (seq.tokens, seq.finish_reason) == ([4, 5, 8, 6, 7, 8, 9, 4, 6], "length")


def test_masks_verify_where_rows_predict_their_own_slot() -> None:
    seq = sequence(12, prompt=[1, 2])
    decoding = BlockDiffusion(verify=True).decode(seq)
    prompt = as_it_stands(next(decoding))
    assert shape(prompt) == (0, "12_", (1, 1, 1), [2])
    draft = decoding.send(predicted("4", "-"))
    assert (draft.start, list(draft.ids)) == (2, [4, *[MASK] * 5])
    assert draft.pattern == Tree(3, (0b1111, 0b1111, 0b1111, 0b1111, 0))
    assert draft.positions == [2, 3, 4, 5, 6, 3]
    assert list(draft.predict) == [3, 4, 5, 6] and draft.predict_from == [7, 4, 5, 6]
    both = decoding.send(predicted("5678", "-++-"))
    assert (both.start, list(both.ids)) == (3, [5, 6, 7, *[MASK] * 7])
    assert both.pattern == Tree(4, (0, 1, *[0b111111] * 4, 0, 1, 3))
    assert both.positions == [3, 4, 5, 6, 7, 8, 9, 4, 5, 6]
    assert list(both.predict) == [4, 5, 6, 7, 8, 9]
    assert both.predict_from == [10, 11, 12, 7, 8, 9]
    branches = [[], [6], [6, 7], [6, 7, MASK], [6, 7, MASK, MASK], [6, 7, MASK, MASK, MASK]]
    assert both.branches == branches
    after = decoding.send(predicted("698765", "++++++"))
    assert seq.tokens == [4, 5, 6, 9]
    assert (after.start, list(after.ids)) == (5, [9, *[MASK] * 5])


def test_edited_block_is_committed_once_nothing_changes() -> None:
    seq = sequence(6, prompt=[1, 2])
    answers: list[Prediction | list[int]] = [
        predicted("45", "+-"),
        predicted("85", "++"),  # slot 3 is filled, slot 2 replaced
        predicted("68", "*+"),  # below the threshold
        predicted("4567", "++++"),
        predicted("4507", "++++"),  # an end-of-sequence replaces a token
        predicted("4507", "++++"),
    ]
    forwards = script(BlockDiffusion(edit=0.6), seq, answers)
    assert [shape(forward) for forward in forwards] == [
        (0, "12__", (4,), [2, 3]),
        (0, "124_", (4,), [3, 2]),
        (0, "1258", (4,), [2, 3]),
        (4, "____", (4,), [4, 5, 6, 7]),
        (4, "4567", (4,), [4, 5, 6, 7]),
        (4, "4507", (4,), [4, 5, 6, 7]),
    ]
    assert (seq.tokens, seq.finish_reason) == ([5, 8, 4, 5], "stop")


def test_edits_of_a_block_end() -> None:
    seq = sequence(5, prompt=[1, 2, 3])
    answers = [predicted("4", "+"), *(predicted(str(5 + turn % 2), "+") for turn in range(16))]
    answers += [predicted("1234", "++++"), predicted("1234", "++++")]
    forwards = script(BlockDiffusion(edit=0.0), seq, answers)
    assert [forward.start for forward in forwards] == [0] * 18 + [4]
    assert seq.tokens == [6, 1, 2, 3, 4]


def test_most_confident_branch_continues() -> None:
    seq = sequence(8, prompt=[1] * 4)
    decoding = BlockDiffusion(lookahead=2).decode(seq)
    assert shape(as_it_stands(next(decoding))) == (0, "1111____", (4, 4), [4, 5, 6, 7])
    forward = as_it_stands(decoding.send(predicted("4567", "+-*-")))
    assert (forward.start, seq.tokens) == (4, [4])
    assert list(forward.ids) == [4, MASK, 6, MASK, 4, 5, MASK, MASK, 4, MASK, MASK, MASK]
    assert forward.pattern == Tree(4, (0xF,) * 4 + (0xF0,) * 4 + (0xF00,) * 4)
    assert forward.positions == [4, 5, 6, 7] * 3
    assert list(forward.predict) == [5, 7, 6, 7, 5, 6, 7]
    assert forward.predict_from == [5, 7, 10, 11, 13, 14, 15]
    assert forward.branches is None
    # The second branch: slot 6 is its best hole, and the one that would remain is filled too.
    after = decoding.send(predicted("7891234", "--*----"))
    assert seq.tokens == [4, 5, 9, 1]
    assert shape(after) == (4, "4591____", (4, 4), [8, 9, 10, 11])


def test_of_equal_branches_one_that_fills_a_hole_continues() -> None:
    seq = sequence(8, shift=1, prompt=[1] * 4)
    decoding = BlockDiffusion(lookahead=1).decode(seq)
    for answer in (None, predicted("5", "-"), predicted("678", "--+"), predicted("923", "---")):
        decoding.send(answer)  # type: ignore[arg-type]  # None begins
    assert seq.tokens == [5, 6, 9, 8]


@pytest.mark.parametrize(("size", "most"), [(2, 30), (4, 14), (8, 6), (31, 1), (32, 0)])
def test_branches_of_a_block_fit_into_one_forward(size: int, most: int) -> None:
    if most:
        BlockDiffusion(lookahead=most).check_request(sequence(block=size))
        assert size * most <= BlockDiffusion(lookahead=most).slots_needed(0, 0) < 63
    with refuses("lookahead"):
        BlockDiffusion(lookahead=most + 1).check_request(sequence(block=size))


def test_processors_see_the_text_of_each_branch() -> None:
    texts: list[tuple[int, list[int]]] = []

    def record(logits: Tensor, slots: Sequence[int], text: Sequence[int]) -> None:
        if len(slots) == 1:
            texts.append((slots[0], list(text)))

    engine = engine_of(("blocks", block_model(seed=1)))
    target = {"target": runner(engine, "blocks")}
    for canvas in (False, True):
        method = BlockDiffusion(lookahead=3, threshold=0.4, canvas=canvas)
        enter(engine, method, [5] * 4, runners=target, max_tokens=16, processors=(record,))
        finish(engine)
        assert texts and all(len(text) == slot for slot, text in texts)
        assert all(text[:4] == [5] * 4 for _, text in texts)
        assert {MASK in text[4:] for _, text in texts} == {False, True}
        texts.clear()


def test_fixed_tokens_are_not_holes() -> None:
    given = {6: 7, 7: 7, 9: 8}
    seq = sequence(6, fixed_tokens=given)
    forwards = script(BlockDiffusion(), seq, [predicted("456", "+++")])
    assert [shape(forward) for forward in forwards] == [(0, "12312377_8__", (4, 4, 4), [8, 10, 11])]
    assert (seq.tokens, seq.finish_reason) == ([7, 7, 4, 8, 5, 6], "length")


@pytest.mark.parametrize("shift", [0, 1])
def test_verified_drafts_count_for_penalties(shift: int) -> None:
    engine = engine_of(("blocks", block_model(seed=1 + shift, shift=shift)))
    target = {"target": runner(engine, "blocks")}
    for seed, temperature in enumerate((0.0, 0.0, 0.7, 1.5)):
        texts, forwards = [], []
        for block in (None, 1):
            job = enter(
                engine,
                BlockDiffusion(verify=True, threshold=None, block=block),
                [5, 3 + seed],
                runners=target,
                max_tokens=24,
                sampling=Sampling(temperature=temperature, seed=seed),
                processors=(Penalties(begin=2, presence=0.5, frequency=0.3, repetition=1.2),),
            )
            finish(engine)
            texts.append(tokens(job))
            forwards.append(len(job.trace))
        assert texts[0] == texts[1] and len(set(texts[0])) > 3
        assert forwards[1] == 24
