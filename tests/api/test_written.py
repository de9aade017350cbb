"""Tokens of answers in later prompts."""

import json
from typing import Any

from outpace import LLM
from outpace.api.output import Output
from outpace.api.parts import AnswerParts
from outpace.api.written import MAX_WRITTEN_ANSWERS, WrittenAnswers
from outpace.constraint.calls import ToolCall
from toolbox import tool_llm


def answer(ids: list[int], *calls: ToolCall, **fields: Any) -> Output:
    parts = AnswerParts("", "", [*calls]) if calls else None
    defaults = {"finish_reason": "stop", "steps": [], "prompt_tokens": 0, "seconds": 0.0}
    return Output(text="", ids=ids, parsed=parts, **defaults | fields)


def test_an_answer_keeps_its_tokens_where_its_text_is_unchanged() -> None:
    text = LLM("tiny-ar").text
    written = WrittenAnswers(text)
    prompt, *answers, tail = map(text.encode_plain, ("red ball\n", "one two", "two one", "\nred "))
    apart = [
        [token for c in text.decode(each) for token in text.encode_plain(c)] for each in answers
    ]
    assert apart != answers
    written.add(prompt, answer(apart[0]))
    written.add([*prompt, *apart[0], *tail], answer(apart[1]))
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
        written.add([*tail, number], answer(apart[0]))
    assert written.restore(whole) == whole


def test_calls_keep_the_form_in_which_they_were_written() -> None:
    text = tool_llm("tiny-ar", "generic").text
    call, later = ToolCall("stop", '{"now":true,\n "why": "é"}'), ToolCall("stop", "{}")
    fence = f'```json\n{{"name": "stop", "arguments": {call.arguments}}}\n```'
    asked = {"role": "user", "content": "red ball"}
    prompt, ids = text.encode([asked]), text.encode_plain(fence)

    def sent(*calls: ToolCall) -> list[int]:
        functions = [{"function": {"name": n, "arguments": json.loads(a)}} for n, a in calls]
        return text.encode([asked, {"role": "assistant", "tool_calls": functions}, asked])

    def restored(output: Output, *calls: ToolCall) -> list[int]:
        (written := WrittenAnswers(text)).add(prompt, output)
        return written.restore(sent(*calls))

    found = restored(answer(ids, call), call)
    assert text.decode(found) == text.decode(sent(call)).replace(
        text.call_format.write_calls([("stop", '{"now": true, "why": "é"}')]), fence
    )
    assert found[len(prompt) :][: len(ids)] == ids
    for output, calls in (
        (answer(ids, call), [later]),
        (answer(ids, call), [call, later]),
        (answer(ids, call, finish_reason="length"), [call]),
        (answer(ids), [call]),
        (answer(ids, ToolCall("stop", "{")), [later]),
    ):
        assert restored(output, *calls) == sent(*calls)
