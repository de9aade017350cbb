"""Thoughts in the Python API: parts of growing answers, conversations, and options."""

import copy
import json
import pickle
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from outpace import LLM, OptionError
from outpace.api.options import RequestOptions
from outpace.api.parts import AnswerFormat, AnswerParser, parse_answer
from outpace.api.text import validate_prompt
from outpace.constraint.calls import CALL_FORMATS
from outpace.constraint.thoughts import THOUGHT_FORMATS, ThoughtFormat
from outpace.methods import Diffusion
from refusal import refuses
from thinking import TEMPLATES, thinking_llm
from toolbox import SCHEMAS, TOOLS, tool_model

CHANNELS = THOUGHT_FORMATS[1]
every = pytest.mark.parametrize("form", THOUGHT_FORMATS, ids=lambda form: form.name)
THOUGHT = "A <b\n\n</thin <|end|><|start|> \n c"
CALL = CALL_FORMATS[0].write_calls([("f", '{"a": "</think>"}')])


def texts(form: ThoughtFormat) -> dict[str, tuple[str, str]]:
    opened = form.begin + "\n\n" + THOUGHT
    whole = opened + "\n" + form.end
    return {
        whole + "\n\nHi\n": (THOUGHT, "Hi\n"),
        whole + "\n\n\n\nHi": (THOUGHT, "\n\nHi"),
        whole + "Hi" + form.end: (THOUGHT, "Hi" + form.end),
        whole: (THOUGHT, ""),
        opened + "\n\n": (THOUGHT, ""),
        opened + form.end[:-1]: (THOUGHT + form.end[:-1], ""),
        form.begin + form.end + "Hi": ("", "Hi"),
        form.direct + "Hi" + whole: ("", "Hi" + whole),
        "Hi": ("", "Hi"),
        "\n" + whole: ("", "\n" + whole),
        form.begin[:-1]: ("", form.begin[:-1]),
        "": ("", ""),
    }


def feed(form: AnswerFormat, text: str, cut: list[int]) -> tuple[str, str, list[Any]]:
    parser, found = AnswerParser(form), ["", ""]
    calls: list[list[str]] = []
    for begin, end in pairwise([0, *cut, len(text)]):
        parser.feed(text[begin:end], final=end == len(text))
        delta = parser.take()
        found[0] += delta.reasoning
        found[1] += delta.text
        for number, name, arguments in delta.calls:
            calls += [[name, ""]] if name is not None else []
            calls[number][1] += arguments
    assert [parser.reasoning, parser.text] == found
    return found[0], found[1], [tuple(call) for call in calls]


@every
def test_stream_equals_whole(form: ThoughtFormat) -> None:
    for calls in (None, CALL_FORMATS[0]):
        parts = AnswerFormat(form, calls)
        for text, (thoughts, answer) in texts(form).items():
            for after in ("", CALL) if form.end + "\n" in text and calls else ("",):
                expected = thoughts, answer, [("f", '{"a": "</think>"}')] if after else []
                whole = parse_answer(parts, text + after)
                assert (whole.reasoning, whole.text, whole.calls) == expected
                size = len(text + after)
                cuts = [[at] for at in range(1, size)]
                cuts += [[*range(step, size, step)] for step in range(1, 9)]
                for cut in cuts:
                    assert feed(parts, text + after, cut) == expected, (text, cut)


HARMONY = next(form for form in CALL_FORMATS if form.name == "harmony")


@pytest.mark.parametrize(
    ("name", "method"),
    [("tiny-ar", None), pytest.param("tiny-dream", Diffusion(), marks=pytest.mark.nightly)],
)
def test_answers_of_gpt_oss(name: str, method: Any) -> None:
    marks = CHANNELS.required
    more = "{%- if 0 %}" + "{{- '" + "' }}{{- '".join(marks) + "' }}{%- endif %}"
    llm = LLM(tool_model(name, "harmony", more))
    assert llm.text.thought_format is CHANNELS and llm.text.call_format is HARMONY
    options: Any = {"tools": TOOLS, "max_tokens": 120, "temperature": 1.0, "method": method}
    options["max_reasoning_tokens"] = 9
    kinds = set()
    for seed in range(4):
        (output,) = llm.generate("hi", seed=seed, tool_choice="required", **options)
        (call,) = output.tool_calls
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert output.content == "" and output.finish_reason == "stop"
        (output,) = llm.generate("hi", seed=seed, **options)
        kinds.add((bool(output.reasoning), bool(output.tool_calls)))
        assert "<|channel|>final" not in output.content[:20]
        assert bool(output.content) != bool(output.tool_calls)
    marker = llm.text.tokenizer.backend_tokenizer.token_to_id("<|channel|>")  # type: ignore[union-attr]
    (plain,) = llm.generate("hi", max_tokens=30, logit_bias={marker: 1.0})
    assert plain.tool_calls == []


def test_output_has_thoughts() -> None:
    llm = thinking_llm("tiny-ar", "open")
    (output,) = llm.generate("Tom has 3 apples.", max_tokens=20, max_reasoning_tokens=5)
    assert output.reasoning and output.content
    assert output.text == f"{output.reasoning}</think>{output.content}"
    assert output.message == {
        "role": "assistant",
        "content": output.content,
        "reasoning_content": output.reasoning,
    }
    assert "".join(output.pieces()) == output.text
    for same in (copy.copy(output), pickle.loads(pickle.dumps(output))):
        assert same.message == output.message
    (plain,) = llm.generate("Tom has 3 apples.\n<think>\n", max_tokens=5, raw=True)
    assert plain.reasoning == "" and plain.content == plain.text
    (closed,) = thinking_llm("tiny-ar", "think").generate(
        "Tom has 3 apples.",
        max_tokens=9,
        max_reasoning_tokens=3,
        template={"enable_thinking": False},
    )
    assert closed.reasoning == "" and closed.content == closed.text != ""


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("thoughts", ["", "Hm"])
def test_last_message_is_continued(form: str, thoughts: str) -> None:
    text = thinking_llm("tiny-ar", form).text
    assert text.tokenizer is not None
    eos = text.tokenizer.special_tokens_map["eos_token"]
    question, content = {"role": "user", "content": "hi"}, f"Yes {eos}"
    begun = {"role": "assistant", "content": content, "reasoning_content": thoughts}
    start, form_after = text.encode_request([question], RequestOptions())
    continued = RequestOptions(continue_final_message=True)
    ids, plain = text.encode_request([question, begun], continued)
    before, whole = text.decode(start, special=True), text.decode(ids, special=True)
    assert whole.startswith(before) and text.tokenizer.eos_token_id not in ids
    parts = parse_answer(form_after, whole.removeprefix(before))
    assert (parts.reasoning, parts.text) == (thoughts, content)
    assert plain.thoughts is None
    for last, name in (({"content": ""}, "content"), ({"role": "user"}, "role")):
        with refuses(f"messages[1].{name}"):
            message = {"role": "assistant", "content": "x"} | last
            text.encode([question, message], continues=True)


@pytest.mark.parametrize("form", TEMPLATES)
def test_effort_reaches_the_template(form: str) -> None:
    llm = thinking_llm("tiny-ar", form)

    def prompt(effort: str | None) -> str:
        return llm.text.decode(llm.text.encode("hi", effort=effort), special=True)

    if form == "open":
        with refuses("reasoning_effort"):
            prompt("low")
        return
    if form == "channels":
        assert prompt("low").endswith("Reasoning: low\n")
        assert prompt(None).endswith("Reasoning: medium\n")
        return
    assert prompt("high") == prompt(None) == "hi\n"
    assert prompt("none") == "hi\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("form", TEMPLATES)
def test_thoughts_in_history(form: str) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": None},
    ]
    llm = thinking_llm("tiny-ar", form)
    text = llm.text.decode(llm.text.encode(messages), special=True)
    assert text.startswith("a\nb\n(c)\nd\n"), text
    plain = LLM("tiny-ar")
    assert plain.text.encode(messages[:2]) == plain.text.encode(
        [messages[0], {"role": "assistant", "content": "b"}]
    )
    plain = LLM("tiny-ar")
    assert plain.text.tokenizer is not None
    plain.text.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think></think>' if 0 }}"
    )
    text = plain.text.decode(plain.text.encode(messages[:2]))
    assert text == "a<think>\nc\n</think>\n\nb"


@pytest.mark.parametrize(
    ("param", "options"),
    [
        *(
            ("max_reasoning_tokens", {"max_reasoning_tokens": value})
            for value in (-1, True, 2.5, float("nan"), "5", 5)
        ),
        ("ignore_eos", {"max_reasoning_tokens": 5, "ignore_eos": True}),
        ("raw", {"max_reasoning_tokens": 5, "raw": True}),
        *(
            ("reasoning_effort", {"reasoning_effort": value})
            for value in ("much", 5, ["low"], "low")
        ),
        ("reasoning_effort", {"reasoning_effort": "low", "raw": True}),
    ],
)
def test_invalid_option_is_named(param: str, options: Any) -> None:
    with pytest.raises(OptionError) as caught:
        LLM("tiny-ar").generate("hi", **options)
    assert caught.value.param == param


def test_invalid_message_is_named() -> None:
    for message in (
        {"role": "user", "content": "a", "reasoning_content": "b"},
        {"role": "assistant", "content": "a", "reasoning_content": 5},
    ):
        with refuses("messages[0].reasoning_content"):
            validate_prompt([message])
