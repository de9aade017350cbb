"""Lookup, forward by forward, and the copies that it finds."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import request_of, script
from outpace import LLM
from outpace.api.options import Options
from outpace.decoding import Forward, Prediction
from outpace.methods import Lookup
from outpace.methods.copies import AnswerStore, CopyFinder


def fed(forwards: list[Forward]) -> list[tuple[int, list[int]]]:
    return [(forward.start, list(forward.ids)) for forward in forwards]


def test_a_copy_is_proposed_where_the_end_repeats() -> None:
    request = request_of(prompt=[1, 2, 3, 4, 1], max_tokens=6)
    answers = [[2], [3, 9, 9], [5], [6]]
    forwards = script(Lookup(tokens=2, match=2), request, [*answers, [7]])
    assert request.tokens == [2, 3, 9, 5, 6, 7]
    assert fed(forwards) == [
        (0, [1, 2, 3, 4, 1]),
        (5, [2, 3, 4]),  # 1 2 occurs earlier, followed by 3 4
        (7, [9]),
        (8, [5]),
        (9, [6]),
    ]
    assert list(forwards[1].predicted_slots()) == [6, 7, 8]


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3]),  # the longest match, not the latest
        ([1, 7, 1, 8, 1, 8, 1], [8, 1, 8]),
        # Among equal ones, the most frequent next token, then the latest place.
        ([5, 1, 7, 6, 1, 8, 9, 1, 7, 3, 1], [7]),
        ([5, 1, 7, 6, 1, 8, 9, 1], [8]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], [3, 5]),
        ([1, 2, 3], []),
        ([1], []),
        ([4, 4, 4], [4, 4]),  # which repeats
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], [5, 1, 2, 3]),  # at most four
    ],
)
def test_copied_tokens(text: list[int], copy: list[int]) -> None:
    assert CopyFinder(1).find_copy(text, 4) == copy


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=31), match=st.integers(1, 4))
def test_a_growing_text_is_searched_like_a_new_one(text: list[int], match: int) -> None:
    grown = CopyFinder(match)
    for count in range(1, len(text) + 1):
        assert grown.find_copy(text[:count], 3) == CopyFinder(match).find_copy(text[:count], 3)


def test_answers_of_earlier_requests_are_copied() -> None:
    store = AnswerStore()
    for shared in (True, False, True):
        request = request_of(prompt=[5, 6, 7], max_tokens=6, shared_answers=store)
        is_copied = shared and bool(store.parts)
        answers = [[1, 2, 3, 4], [8]] if is_copied else [[t] for t in (1, 2, 3, 4, 8)]
        forwards = script(Lookup(tokens=3, shared=shared), request, [[0], *answers])
        assert request.tokens == [0, 1, 2, 3, 4, 8]
        # The prompt and the first token match by four tokens.
        assert (fed(forwards)[1] == (3, [0, 1, 2, 3])) == is_copied


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_repeated_question_takes_few_forwards(temperature: float) -> None:
    llm = LLM("tiny-ar", Lookup(tokens=8, shared=True), cache_gib=0.01)
    options: Options = {"max_tokens": 40, "temperature": temperature, "seed": 5}
    question = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
    (plain,) = llm.generate(question, method="autoregressive", **options)
    outputs = [llm.generate(question, **options)[0] for _ in range(2)]
    assert [output.ids for output in outputs] == [plain.ids] * 2
    assert outputs[1].forwards <= 1 + len(plain.ids) / 4 < outputs[0].forwards
    again = LLM("tiny-ar", Lookup(tokens=8, shared=True), cache_gib=0.01)
    assert again.generate(question, **options)[0].forwards == outputs[0].forwards


@pytest.mark.nightly
def test_five_hundred_requests_with_shared_answers_equal_plain_decoding() -> None:
    llm = LLM("tiny-ar", Lookup(tokens=8, shared=True), cache_gib=0.05)
    people = [f"Tom has {n} apples and buys {n % 7} more. How many?" for n in range(63)]
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    copied = 0
    for temperature in (0.0, 0.8):
        for more in (
            {},
            {"presence_penalty": 0.7},
            {"repetition_penalty": 1.3},
            {"schema": number},
        ):
            options = cast(
                Options, {"max_tokens": 24, "temperature": temperature, "seed": 7, **more}
            )
            plain = llm.generate(people, method="autoregressive", **options)
            shared = llm.generate(people, **options)
            assert [output.ids for output in shared] == [output.ids for output in plain]
            copied += sum(output.forwards for output in plain)
            copied -= sum(output.forwards for output in shared)
    assert copied > 1000


def test_an_answer_that_was_cut_is_shared() -> None:
    store = AnswerStore()
    request = request_of(prompt=[1], max_tokens=9, shared_answers=store)
    decoding = Lookup(shared=True).decode(request)
    next(decoding)
    for token in (2, 3, 4, 5):
        decoding.send(Prediction(tokens=[token]))
    request.finish_reason = "stop"
    decoding.close()
    store.add_answer([7, 8])
    assert store.find_copy([9, 1, 2, 3], 8) == [4, 5]
    assert store.find_copy([2, 3, 4, 5], 8) == store.find_copy([6, 5, 7, 8], 8) == []


@given(
    answers=st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=9),
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_shared_answers_are_bounded_and_found(answers: list[list[int]], ids: list[int]) -> None:
    store = AnswerStore(part_tokens=32)
    for answer in answers:
        store.add_answer(answer)
    texts = [[*text] for text, _ in store.parts]
    assert len(texts) <= 2 and all(len(text) <= 32 for text in texts)
    copied = store.find_copy(ids, 5)
    ends = [
        text[: at + len(copied)]
        for text in texts
        for at in range(3, len(text))
        if text[at - 3 : at] == ids[-3:]
    ]
    assert len(copied) <= 5 and -1 not in copied
    assert not copied or any(end[-len(copied) :] == copied for end in ends)
