"""Tokens of answers in later prompts."""

from outpace import LLM
from outpace.api.written import MAX_WRITTEN_ANSWERS, WrittenAnswers


def test_an_answer_keeps_its_tokens_where_its_text_is_unchanged() -> None:
    text = LLM("tiny-ar").text
    written = WrittenAnswers(text)
    prompt, *answers, tail = map(text.encode_plain, ("red ball\n", "one two", "two one", "\nred "))
    apart = [
        [token for c in text.decode(each) for token in text.encode_plain(c)] for each in answers
    ]
    assert apart != answers
    written.add(prompt, apart[0])
    written.add([*prompt, *apart[0], *tail], apart[1])
    whole = [*prompt, *answers[0], *tail, *answers[1], *tail]
    assert written.restore(whole) == [*prompt, *apart[0], *tail, *apart[1], *tail]
    for other in (
        [*tail, *whole],  # another prompt
        [*prompt, *answers[1], *tail, *answers[1], *tail],  # another answer
        [*prompt, *answers[0][:-1]],
        prompt,
    ):
        assert written.restore(other) == other
    for number in range(MAX_WRITTEN_ANSWERS):
        written.add([*tail, number], apart[0])
    assert written.restore(whole) == whole
