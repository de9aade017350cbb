"""Automata of calls, and the formats of chat templates."""

import json
from typing import Any

import jsonschema
import pytest

from constrained import CASES, FIRST, SCHEMAS
from outpace.api.options import Options
from outpace.constraint.calls import CALL_FORMATS, CallFormat, find_call_format
from outpace.constraint.dfa import dfa_accepts
from outpace.constraint.tools import tools_dfa
from outpace.methods import Method
from toolbox import TEMPLATES, TOOLS, tool_llm, tool_model

every = pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [("get", 0, CITY), ("get_all", 1, {"type": "object", "properties": {}})]
CALLS = [("get", '{"city": "Oslo"}'), ("get_all", "{}")]


def source(**changes: Any) -> str:
    """Text of a rule for two functions."""
    rule = {"functions": FUNCTIONS, "free": False, "single": False, "loose": False, **changes}
    return json.dumps(rule)


@every
def test_automaton_accepts_calls(form: CallFormat) -> None:
    several, single = tools_dfa(source(), form), tools_dfa(source(single=True), form)
    for call in CALLS:
        text = form.write_calls([call]).encode()
        assert dfa_accepts(several, text) and dfa_accepts(single, text)
        for broken in (text[:-1], text[1:], text + b" ", text.replace(b"get", b"set"), b"", b"hi"):
            assert not dfa_accepts(several, broken)
    both = form.write_calls(CALLS * 2).encode()
    assert dfa_accepts(several, both) == (form.between is not None)
    assert not dfa_accepts(single, both)
    for name, arguments in (("get", "{}"), ("get_all", '{"city": "Oslo"}'), ("get", '{"city": 5}')):
        assert not dfa_accepts(several, form.write_calls([(name, arguments)]).encode())


@every
def test_free_text_has_no_marker(form: CallFormat) -> None:
    dfa = tools_dfa(source(free=True), form)
    call = form.write_calls(CALLS[:1])
    marker, front = form.marker, form.marker[:-1]
    plain = ["", "hi", "é\n", front, front + front, "x" + front + "y", marker[:2] * 3, front + " "]
    plain += [marker[:1] + marker[:n] for n in range(len(marker))]
    for text in (form.preface + each for each in plain):
        assert dfa_accepts(dfa, text.encode()), text
        assert dfa_accepts(dfa, (text + call).encode()), text
        assert dfa_accepts(dfa, (text + marker).encode()) == (form.leads and text != ""), text
        state = 0
        for byte in text.encode():
            state = int(dfa.table[state, byte])
        assert state < dfa.num_open


VARIANTS = [(form, variant) for form in CALL_FORMATS for variant in form.variants]


@pytest.mark.parametrize(("form", "variant"), VARIANTS, ids=lambda each: repr(each.begin))
def test_variant_of_a_call(form: CallFormat, variant: CallFormat) -> None:
    dfa = tools_dfa(source(free=True, loose=True), form)
    call = variant.write_calls(CALLS[:1])
    for text in (call, form.write_calls(CALLS[:1]), "hi " + form.write_calls(CALLS[:1])):
        assert dfa_accepts(dfa, text.encode()), text
    assert dfa_accepts(dfa, variant.write_calls(CALLS).encode()) == (variant.between is not None)
    head = f"{variant.begin}get{variant.middle}"
    for end in range(len(head)):
        for text in (head[:end], head[:end] + "x", head[:end] + form.write_calls(CALLS[:1])):
            heads = [each.begin + "get" + each.middle for each in form.variants]
            is_other = any(text.startswith(each) for each in heads)
            assert dfa_accepts(dfa, text.encode()) != is_other, text
        is_text = form.leads and end > 0
        assert dfa_accepts(dfa, (head[:end] + form.marker).encode()) == is_text
    assert not dfa_accepts(dfa, head.encode())
    assert not dfa_accepts(dfa, (call + "x").encode())
    assert dfa_accepts(dfa, (" " + head).encode())
    assert dfa_accepts(dfa, variant.write_calls([("unknown", "5")]).encode())


GEMMA = (
    "{{ 'You MUST put it in the format of "
    """{"name": function name, "parameters": dictionary of argument name and its value}' }}"""
)
"""How Google's guide to Gemma 3 asks for calls."""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        *((TEMPLATES[form.name], form.name) for form in CALL_FORMATS),
        ({"default": "{{ messages }}", "tool_use": TEMPLATES["tool_call"]}, "tool_call"),
        (r'{{ "<tool_call>{\"name\": <name>, \"arguments\": <json>}</tool_call>" }}', "tool_call"),
        (GEMMA, "object"),
        ("<tool_call>\n<function=name>\n<parameter=x>arguments", "generic"),
        ("<tool_call>name\n<arg_key>arguments", "generic"),
        ("[TOOL_CALLS]name[CALL_ID]id[ARGS]{}", "generic"),
        (None, None),
    ],
)
def test_format_of_a_template(template: Any, name: str | None) -> None:
    found = find_call_format(template)
    assert (found and found.name) == name


ARGUMENTS = [
    {"type": "object", "properties": {"v": schema, "w": {"type": "null"}}, "required": ["v"]}
    for schema in SCHEMAS
    if "$ref" not in json.dumps(schema)
]


def method_in(form: str, method: Method) -> Method:
    """A method whose further models have the tokens of a format."""
    names = {role: name for role, name in method.model_names().items() if name == "tiny-aux"}
    return method.__class__(
        **{**vars(method), **{role: tool_model(name, form) for role, name in names.items()}}
    )


def check_required(form: str, name: str, method: Method, temperature: float, number: int) -> None:
    """Assert that calls of a function and of another are valid."""
    functions = {"f": ARGUMENTS[number], "g": ARGUMENTS[number - 1]}
    tools = [
        {"type": "function", "function": {"name": key, "parameters": schema}}
        for key, schema in functions.items()
    ]
    options: Options = {
        "method": method_in(form, method),
        "tools": tools,
        "tool_choice": "required",
        "max_tokens": 160,
        "temperature": temperature,
        "seed": number,
    }
    llm = tool_llm(name, form)
    (output,) = llm.generate([llm.text.encode("Tom has 3 apples.")], **options)
    assert output.finish_reason == "stop" and output.tool_calls and output.content == ""
    for call in output.tool_calls:
        jsonschema.Draft202012Validator(functions[call.name]).validate(json.loads(call.arguments))


@pytest.mark.parametrize(("name", "method"), FIRST, ids=str)
def test_required_calls_validate(name: str, method: Method) -> None:
    number = FIRST.index((name, method))
    for form in {CALL_FORMATS[number % len(CALL_FORMATS)].name, "generic"}:
        check_required(form, name, method, number % 2, 7 * number % len(ARGUMENTS))


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("name", "method"), CASES, ids=str)
@every
def test_all_required_calls_validate(
    form: CallFormat, name: str, method: Method, temperature: float
) -> None:
    # Each method has a different tenth of the arguments.
    first = (CASES.index((name, method)) + 5 * temperature) % 10
    for number in range(first, len(ARGUMENTS), 10):
        check_required(form.name, name, method, temperature, number)


@pytest.mark.parametrize(("name", "method"), FIRST[::2], ids=str)
def test_text_is_as_without_tools(name: str, method: Method) -> None:
    llm = tool_llm(name, "tool_call")
    ids = llm.text.encode("Tom has 3 apples and buys 4 more. How many apples does Tom have?")
    options: Options = {"method": method, "temperature": 0.8, "seed": 5, "max_tokens": 24}
    (expected,) = llm.generate([ids], **options)
    (output,) = llm.generate([ids], **options, tools=TOOLS)
    assert (output.ids, output.finish_reason) == (expected.ids, expected.finish_reason)
    assert output.tool_calls == [] and output.content == expected.text
