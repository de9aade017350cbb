"""Tools of the Python API: declarations, conversations, and calls in growing text."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from outpace import LLM, OptionError
from outpace.api.parts import AnswerFormat, AnswerParser, parse_answer
from outpace.api.text import validate_prompt
from outpace.api.tools import read_tool_use
from outpace.constraint.calls import CALL_FORMATS, CallFormat, CallParser, ToolCall
from toolbox import SCHEMAS, TEMPLATES, TOOLS, tool_llm

FORMATS = {form.name: form for form in CALL_FORMATS}
HARD = ['{"a": "}{\\"] \\\\", "b": [{"c": {}}]}', "{}", '{"name": "x", "d": "</tool_call>"}']
"""Arguments with brackets, quotes and marks in strings."""


def parse_calls(form: CallFormat | None, text: str) -> tuple[str, list[ToolCall]]:
    parts = parse_answer(AnswerFormat(calls=form), text)
    return parts.text, parts.calls


every = pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)


def written(form: CallFormat, count: int = 3) -> tuple[str, list[ToolCall]]:
    calls = [ToolCall(f"f{n}", arguments) for n, arguments in enumerate(HARD[:count])]
    calls = calls[: count if form.between else 1]
    return form.write_calls(calls), calls


@every
def test_calls_are_parsed(form: CallFormat) -> None:
    text, calls = written(form)
    assert parse_calls(form, text) == ("", calls)
    assert parse_calls(None, text) == (text, [])
    for plain in ("", "a < b", form.marker[:-1], "x" + form.marker[:-1] + "y"):
        assert parse_calls(form, plain) == (plain, [])
    after = ("Look: " + text, []) if form.leads else ("Look: ", calls)
    assert parse_calls(form, "Look: " + text) == after


@every
def test_stream_equals_whole(form: CallFormat) -> None:
    whole = ("" if form.leads else "A <to b\n") + written(form)[0]
    expected = parse_calls(form, whole)
    cuts = [[at] for at in range(len(whole))]
    cuts += [[*range(size, len(whole), size)] for size in range(1, 9)]
    for cut in cuts:
        parser, text = AnswerParser(AnswerFormat(calls=form)), ""
        calls: list[list[str]] = []
        for begin, end in pairwise([0, *cut, len(whole)]):
            parser.feed(whole[begin:end], final=end == len(whole))
            delta = parser.take()
            text += delta.text
            for number, name, arguments in delta.calls:
                if name is not None:
                    assert number == len(calls)
                    calls.append([name, ""])
                calls[number][1] += arguments
        assert (text, [ToolCall(*call) for call in calls]) == expected
        assert (parser.text, parser.calls) == expected


VARIANTS = [(form, variant) for form in CALL_FORMATS for variant in form.variants]


@pytest.mark.parametrize(("form", "variant"), VARIANTS, ids=lambda each: repr(each.begin))
def test_variants_of_a_call(form: CallFormat, variant: CallFormat) -> None:
    form = replace(form, names=("f0", "f1", "f2"))
    text, calls = written(variant)
    assert parse_calls(form, text) == ("", calls)
    for plain in (" " + text, text.replace('"f0"', '"f9"'), variant.begin + "f0"):
        assert parse_calls(form, plain) == (plain, [])
    for at in range(len(text)):
        parser = CallParser(form)
        for piece in (text[:at], text[at:]):
            parser.feed(piece)
        parser.finish()
        assert (parser.text, parser.calls) == ("", calls)


@pytest.mark.parametrize(
    ("tools", "choice", "expected"),
    [
        (None, None, None),
        ([], "none", None),
        ([], "auto", None),
        (None, "auto", None),
        (TOOLS, "none", None),
        (TOOLS, None, (["get_weather", "stop"], True, False)),
        (TOOLS, "auto", (["get_weather", "stop"], True, False)),
        (TOOLS, "required", (["get_weather", "stop"], False, False)),
        (TOOLS, {"type": "function", "function": {"name": "stop"}}, (["stop"], False, True)),
    ],
)
def test_choice_of_tools(tools: Any, choice: Any, expected: Any) -> None:
    use = read_tool_use(tools, choice, None)
    if expected is None:
        assert use is None
        return
    assert use is not None
    rule = json.loads(use.rule)
    assert ([f[0] for f in rule["functions"]], rule["free"], rule["single"]) == expected


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("tools", {"tools": "x"}),
        ("tools[0]", {"tools": [5]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": "ä"}}]}),
        ("tools[2].function.name", {"tools": TOOLS + TOOLS[:1]}),
        ("tools", {"tools": TOOLS * 65}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "stop"}),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": 2}),
        ("tools", {"tools": TOOLS, "raw": True}),
        ("stop", {"tools": TOOLS, "stop": "a", "tool_choice": "required"}),
    ],
)
def test_invalid_option_is_named(param: str, options: Any) -> None:
    with pytest.raises(OptionError) as caught:
        LLM("tiny-ar").generate("hi", **options)
    assert caught.value.param == param


def test_conversation_with_calls() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = validate_prompt(
        [
            {"role": "user", "content": "hi", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "7"}]},
        ]
    )
    assert messages[0] == {"role": "user", "content": "hi"}
    assert messages[1]["content"] == ""
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert messages[2] == {"role": "tool", "tool_call_id": "a", "name": "f", "content": "7"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_and_results_in_a_loop(name: str) -> None:
    llm = tool_llm("tiny-ar", name)
    assert llm.text.call_format is FORMATS[name]
    conversation: list[Any] = [{"role": "user", "content": "Tom has 3 apples."}]
    (first,) = llm.generate([conversation], tools=TOOLS, tool_choice="required", max_tokens=120)
    for call in first.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert first.content == "" and first.message["content"] is None
    assert (
        "".join(first.pieces())
        == first.text
        == "".join(llm.stream(conversation, tools=TOOLS, tool_choice="required", max_tokens=120))
    )
    conversation.append(first.message)
    for call in first.message["tool_calls"]:
        conversation.append({"role": "tool", "tool_call_id": call["id"], "content": "Oslo"})
    prompt = llm.text.decode(llm.text.encode(conversation))
    assert first.tool_calls[0].name in prompt and prompt.count("Oslo") == len(first.tool_calls)
    (second,) = llm.generate([conversation], tools=TOOLS, max_tokens=12)
    assert second.content and second.message == {"role": "assistant", "content": second.content}
    form = llm.text.call_format
    assert form is not None and second.text == form.preface + second.content


SYSTEM = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
STRICT = """{% for m in messages %}{% if m.role != ["user", "assistant"][loop.index0 % 2] %}
{{ raise_exception("roles must alternate") }}{% endif %}{{ m.content + "\\n" }}{% endfor %}"""
"""Templates without tools: of ChatML, and of Gemma and Mistral without a system turn."""
CITY = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
CALLS = [{"id": each, "type": "function", "function": CITY} for each in "ab"]
TALK: list[Any] = [
    {"role": "user", "content": "Tom <|im_end|>"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "a", "content": "<rain>"},
    {"role": "tool", "tool_call_id": "b", "content": "<sun>"},
    {"role": "user", "content": "so?"},
]


@pytest.mark.parametrize(
    ("template", "has_system"),
    [(SYSTEM, True), (SYSTEM, False), (STRICT, False), (TEMPLATES["args"] + "[CALL_ID]", True)],
)
def test_tools_that_a_template_does_not_describe(template: str, has_system: bool) -> None:
    llm = LLM("tiny-ar")
    assert llm.text.tokenizer is not None
    llm.text.tokenizer.chat_template = template
    talk = [{"role": "system", "content": "Be kind."}, *TALK] if has_system else TALK
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_start|>"}}]
    use = read_tool_use(tools, None, None)
    ids, plain = llm.text.encode(talk, tools=use), llm.text.encode(talk)
    text, marks = llm.text.decode(ids, special=True), llm.text.special_ids["<|im_start|>"]
    order = ['"name": "f"', "Be kind.", "Tom", '"Oslo"}', "<rain>", "<sun>", "so?"]
    places = [text.index(each) for each in order if has_system or each != "Be kind."]
    assert places == sorted(places) and text.index("<|im_start|>") < places[-1]
    assert ids.count(marks) == plain.count(marks) + (template == SYSTEM and not has_system)
    assert text.count("<|im_end|>") == ids.count(llm.text.special_ids["<|im_end|>"]) + 1
