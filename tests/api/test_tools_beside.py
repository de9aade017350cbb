"""Tools beside stop strings and beside constraints on the text."""

import json
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from outpace import OptionError
from outpace.api.detokenizer import Detokenizer
from outpace.api.parts import AnswerFormat, parse_answer
from outpace.constraint.calls import CALL_FORMATS, CallFormat
from outpace.constraint.compiler import build_rule_dfa
from outpace.constraint.dfa import dfa_accepts
from outpace.constraint.tools import tools_dfa
from outpace.methods import Diffusion, Method
from outpace.tokenizer import TextDecoder
from toolbox import SCHEMAS, TOOLS, tool_llm

every = pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
CALL = ("f", '{"a": "x\\n,y"}')
AGE: Any = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


class Characters:
    """A codec whose tokens are characters."""

    name, silent_ids, special_ids = "characters", frozenset[int](), dict[str, int]()
    tokenizer = SimpleNamespace(
        added_tokens_decoder={}, token_bytes=lambda token, previous: chr(token).encode()
    )

    def begin_text(self) -> TextDecoder:
        return TextDecoder(self.tokenizer)  # type: ignore[arg-type]


def cut_text(form: AnswerFormat, text: str, stops: list[str]) -> tuple[str, str, str | None]:
    """The text up to a stop string, its pieces as they are sent, and the stop string."""
    codec: Any = Characters()
    found, sent = Detokenizer(codec, stops, form=form), ""
    for character in text:
        found.push_tokens([ord(character)])
        sent += found.take_text()
    return found.text, sent + found.take_text(final=True), found.stop_string


@every
def test_stop_strings_end_before_a_call(form: CallFormat) -> None:
    front = "" if form.leads else "Look:\nso "
    call = form.write_calls([CALL])
    answers = AnswerFormat(calls=form)
    for stop in (",", "x", "a", "}", form.middle[-2:], call[-3:]):
        if stop not in front + form.marker:
            assert cut_text(answers, front + call, [stop]) == (front + call, front + call, None)
    if front:
        assert cut_text(answers, front + call, [",", "\n"]) == ("Look:", "Look:", "\n")
        assert cut_text(answers, front + call, ["o "]) == ("Look:\ns", "Look:\ns", "o ")
    early = form.marker[:3]
    assert cut_text(answers, front + call, [early]) == (front, front, early)
    if form.preface:
        text = form.preface + "a,b"
        assert cut_text(answers, text, [","]) == (form.preface + "a",) * 2 + (",",)


SERIES = {
    "equal": (["{}"] * 5, 3),
    "two of a kind": (['{"a": 1}'] * 2 + ["{}"] * 2 + ['{"a": 1}'] * 4, 7),
    "distinct": ([f'{{"a": {n}}}' for n in range(140)], 128),
}
"""Arguments of calls in a row, and how many of the calls the answer has."""


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("form", [f for f in CALL_FORMATS if f.between], ids=lambda f: f.name)
def test_repeated_calls_end_the_answer(form: CallFormat, series: str) -> None:
    arguments, count = SERIES[series]
    text = "Look:\n" + form.write_calls([("f", each) for each in arguments])
    for stops in ([], ["\0", "}"]):
        whole, sent, stop = cut_text(AnswerFormat(calls=form), text, stops)
        assert whole == sent and text.startswith(whole) and stop is None
        found = parse_answer(AnswerFormat(calls=form), whole)
        assert [call.arguments for call in found.calls] == arguments[:count]
    codec: Any = Characters()
    together = Detokenizer(codec, form=AnswerFormat(calls=form))
    assert together.push_tokens([*map(ord, text)])
    assert together.text == whole and len(together.ids) == len(whole)


@pytest.mark.parametrize("name", ["array", "args"])
def test_call_beside_stop_strings(name: str) -> None:
    llm = tool_llm("tiny-ar", name)
    tokenizer: Any = llm.text.tokenizer
    marker = tokenizer.backend_tokenizer.token_to_id("[TOOL_CALLS]")
    options: Any = {"tools": TOOLS, "max_tokens": 120, "stop": ['"', "{"], "seed": 3}
    forced = {**options, "logit_bias": {marker: 1000.0}, "parallel_tool_calls": False}
    (output,) = llm.generate("Tom has 3 apples.", **forced)
    (call,) = output.tool_calls
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert output.stop_string is None and output.finish_reason == "stop"
    assert "".join(llm.stream("Tom has 3 apples.", **forced)) == output.text
    (plain,) = llm.generate("Tom has 3 apples.", tools=TOOLS, max_tokens=20, seed=3)
    mark = plain.text[6:8]
    (output,) = llm.generate("Tom has 3 apples.", tools=TOOLS, max_tokens=20, seed=3, stop=mark)
    assert output.text == plain.text[: plain.text.index(mark)] and output.stop_string == mark


def source(**changes: Any) -> str:
    functions = [("f", 0, {"type": "object", "properties": {"a": {"type": "string"}}})]
    rule = {"functions": functions, "free": True, "single": False, "loose": False, **changes}
    return json.dumps(rule)


RULES = {
    "schema": (json.dumps(AGE), ['{"age": 7}', '{"age":99}'], ["", "7", '{"age": 100}', "hi"]),
    "choices": (json.dumps(["yes", "<no", "", "["]), ["yes", "<no", "", "["], ["y", "yes!", "<"]),
    "regex": (r"a*<?b?", ["", "aa", "a<", "<b"], ["c", "a<<"]),
}
"""Constraints, texts that match, and others."""


@every
@pytest.mark.parametrize("kind", RULES)
def test_automaton_has_a_text_or_calls(form: CallFormat, kind: str) -> None:
    rule, right, wrong = RULES[kind]
    dfa = tools_dfa(source(), form, build_rule_dfa(kind, rule, None))
    assert dfa.num_open == 0
    calls = form.write_calls([CALL])
    assert dfa_accepts(dfa, calls.encode()) and not dfa_accepts(dfa, calls[:-2].encode())
    for text in right:
        assert dfa_accepts(dfa, (form.preface + text).encode()), text
        if text:
            assert not dfa_accepts(dfa, (form.preface + text + calls).encode())
    for text in wrong:
        assert not dfa_accepts(dfa, (form.preface + text).encode()), text
        assert not dfa_accepts(dfa, form.preface.encode() + b"x" + text.encode())


def test_text_with_a_marker_is_no_text() -> None:
    hermes, llama = CALL_FORMATS[0], next(f for f in CALL_FORMATS if f.name == "object")
    strings = build_rule_dfa("schema", '{"type": "string"}', None)
    dfa = tools_dfa(source(), hermes, strings)
    assert dfa_accepts(dfa, b'"a<tool_call"') and not dfa_accepts(dfa, b'"a<tool_call>"')
    named = build_rule_dfa("regex", r'\{"name": 5\}|5', None)
    dfa = tools_dfa(source(), llama, named)
    assert dfa_accepts(dfa, b"5") and not dfa_accepts(dfa, b'{"name": 5}')
    with pytest.raises(ValueError, match="begins a call"):
        tools_dfa(source(), llama, build_rule_dfa("regex", r'\{"name": 5\}', None))


@cache
def biased(form: str, token: str) -> dict[int, float]:
    tokenizer: Any = tool_llm("tiny-ar", form).text.tokenizer
    return {tokenizer.backend_tokenizer.token_to_id(token): 1000.0}


CASES: list[Any] = [
    ("tiny-ar", "array", None),
    ("tiny-ar", "object", None),
    pytest.param("tiny-dream", "tool_call", Diffusion(), marks=pytest.mark.nightly),
    ("tiny-wedlm", "args", None),
]


@pytest.mark.parametrize(("name", "form", "method"), CASES, ids=str)
def test_answer_is_a_text_of_the_schema_or_a_call(
    name: str, form: str, method: Method | None
) -> None:
    llm = tool_llm(name, form)
    for seed in range(4):
        options: Any = {
            "method": method,
            "tools": TOOLS,
            "schema": AGE,
            "max_tokens": 80,
            "seed": seed,
            "temperature": float(seed % 2),
        }
        (output,) = llm.generate("Tom has 3 apples.", **options)
        if output.tool_calls:
            for call in output.tool_calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        else:
            jsonschema.validate(json.loads(output.content), AGE)
        assert output.finish_reason == "stop"
        assert "".join(llm.stream("Tom has 3 apples.", **options)) == output.text
    if form in ("array", "args"):
        options |= {"logit_bias": biased(form, "[TOOL_CALLS]")}
        options |= {"parallel_tool_calls": False, "max_tokens": 120}
        assert len(llm.generate("Tom has 3 apples.", **options)[0].tool_calls) == 1
    options = {"tools": TOOLS, "regex": "[0-9]{3}", "max_tokens": 80, "method": method}
    (output,) = llm.generate("Tom has 3 apples.", tool_choice="required", **options)
    assert output.tool_calls and output.content == ""
    (output,) = llm.generate("Tom has 3 apples.", **options)
    assert output.tool_calls or re.fullmatch("[0-9]{3}", output.content)


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("grammar", {"grammar": 'start: "a"'}),
        ("stop", {"schema": AGE, "stop": "a"}),
        ("stop", {"tool_choice": "required", "stop": "a"}),
        ("min_tokens", {"min_tokens": 3}),
        ("schema", {"schema": {"type": "teapot"}}),
        ("regex", {"regex": "("}),
        ("regex", {"regex": "a", "schema": AGE}),
    ],
)
def test_conflict_is_named(param: str, options: Any) -> None:
    with pytest.raises(OptionError) as caught:
        tool_llm("tiny-ar", "tool_call").generate("hi", tools=TOOLS, **options)
    assert caught.value.param == param
