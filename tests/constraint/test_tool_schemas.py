"""Lists of tools as servers of the Model Context Protocol declare them, drawn with their values."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import pytest

from constrained import random_text
from outpace import LLM, OptionError
from outpace.api.options import Options
from outpace.api.tools import read_tool_use
from outpace.constraint.calls import GENERIC_FORMAT
from outpace.constraint.dfa import dfa_accepts
from outpace.constraint.tools import CallBudget, arguments_dfa, log_loosened, tools_dfa

Drawn = tuple[Any, Any]
"""A schema, and a value that it allows."""

LEAVES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "string"}, ["", "a b", 'x"y']),
    ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, ["ab"]),
    ({"type": "string", "pattern": r"^(?=.*\d)\p{L}+$"}, ["ab1"]),
    ({"type": "string", "pattern": "^[a-z]{2}-[0-9]+$", "maxLength": 20}, ["ab-12"]),
    ({"type": "string", "format": "binary"}, ["zz"]),
    ({"type": "string", "format": "uri", "title": "Address"}, ["https://example.com/a"]),
    ({"type": "string", "minLength": 1, "maxLength": 65_536}, ["x" * 70]),
    ({"type": "string", "not": {"const": ""}, "default": "b"}, ["b"]),
    ({"type": ["string", "null"], "description": "Or null."}, ["a", None]),
    ({"type": "string", "nullable": True}, ["a", None]),
    ({"enum": ["a", 1, None, True, 2.5, {"b": 1}]}, ["a", 1, None, True, 2.5, {"b": 1}]),
    ({"enum": ["a"], "nullable": True, "x-enum-names": ["A"]}, ["a", None]),
    ({"type": "integer", "minimum": 1, "maximum": 365, "format": "int32"}, [1, 99, 365]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**63)]),
    ({"type": "integer", "multipleOf": 5, "if": {"minimum": 9}, "then": {"maximum": 20}}, [5, 10]),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, [0.5, 3]),
    ({"type": "number", "minimum": -90.5, "maximum": 90.5}, [-90.5, 0, 12.25]),
    ({"type": "number", "multipleOf": 0.01}, [0.25]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [1.5]),
    ({"type": "boolean", "required": True}, [True, False]),
    ({"$ref": "https://example.com/schema"}, ["a"]),
    ({"type": "object"}, [{}, {"a": 1}]),
    ({}, ["a", 1, None, [True]]),
    ({"$ref": "#/$defs/name"}, ["ab", "a"]),
    ({"$ref": "#/$defs/tree", "description": "A tree."}, [{"leaf": 1}, {"next": {"leaf": 2}}]),
    ({"$ref": "#/components/schemas/Id"}, [7]),
    ({"$ref": "#/$defs/tree/properties/leaf"}, [7]),
]
"""Schemas of values without parts, each with values that it allows."""

TREE = {"leaf": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}
DEFINITIONS = {
    "$defs": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12, "x-order": 1},
        "tree": {"type": "object", "properties": TREE},
    },
    "components": {"schemas": {"Id": {"type": "integer"}}},
}


def draw_leaf(rng: Random, depth: int = 0) -> Drawn:
    schema, values = rng.choice(LEAVES)
    return schema, rng.choice(values)


def draw_array(rng: Random, depth: int) -> Drawn:
    if rng.random() < 0.2:  # a tuple, as draft 4 or the current one writes it
        return {"type": "array", rng.choice(["items", "prefixItems"]): [{"type": "string"}]}, ["a"]
    items, value = draw_value(rng, depth)
    options = [{}, {"minItems": 1}, {"maxItems": 5000}, {"uniqueItems": True}, {"contains": items}]
    return {"type": "array", "items": items, **rng.choice(options)}, [value]


def draw_choice(rng: Random, depth: int) -> Drawn:
    parts = [draw_value(rng, depth) for _ in range(rng.randint(1, 3))]
    schema, value = rng.choice(parts)
    choices: list[Drawn] = [
        ({"anyOf": [each for each, _ in parts]}, value),
        ({"oneOf": [{"const": "another"}, schema]}, value),
        ({"allOf": [schema, {"description": "Further."}]}, value),
        ({"anyOf": [schema], "nullable": True}, rng.choice([value, None])),
        ({"if": {"type": "string"}, "then": {}, "else": {"type": "null"}}, "a"),
    ]
    return rng.choice(choices)


def draw_object(rng: Random, depth: int) -> Drawn:
    parts = {f"p{number}": draw_value(rng, depth) for number in range(rng.randint(1, 4))}
    present = [name for name in parts if rng.random() < 0.7]
    required = [name for name in present if rng.random() < 0.5]
    properties = {name: part for name, (part, _) in parts.items()}
    schema = {"properties": properties, "required": required}
    further: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"type": "object", "additionalProperties": False}, {}),
        ({"type": "object", "unevaluatedProperties": False}, {}),
        ({"dependentRequired": {"zz": ["p0"]}}, {}),
        ({"minProperties": 0, "maxProperties": 100, "nullable": True}, {}),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "x-key": {"a": 1}}, {}),
        ({"type": "object", "additionalProperties": parts["p0"][0]}, {}),
    ]
    if not any(isinstance(parts[name][1], list | dict) for name in present):
        # Where a keyword is left out, free values are two levels deep.
        pattern = {"additionalProperties": False, "patternProperties": {"^x-": {}}}
        further.insert(0, (pattern, {"x-y": 1}))
    more, members = rng.choice(further)
    if more is further[-1][0]:
        return more, {"zz": parts["p0"][1]}
    return schema | more, {name: parts[name][1] for name in present} | members


def draw_value(rng: Random, depth: int) -> Drawn:
    kinds: list[Callable[[Random, int], Drawn]] = [draw_leaf, draw_array, draw_choice, draw_object]
    return rng.choice([draw_leaf] * 2 + kinds if depth else [draw_leaf])(rng, depth - 1)


def test_large_tools_are_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("calls", "tools"):
        monkeypatch.setattr(f"outpace.constraint.{module}.MAX_CALL_STATES", 2000)
    log_loosened.cache_clear()
    schemas = [{"type": "object"}] * 9
    schemas += [{"properties": {f"p{n}": {"type": "string", "maxLength": 50}}} for n in range(9)]
    functions = [(f"f{number}", number, schema) for number, schema in enumerate(schemas)]
    rule = {"functions": functions, "free": False, "single": True, "loose": False}
    for _ in range(2):
        dfa = tools_dfa(json.dumps(rule | {"strict": ["f9"]}), GENERIC_FORMAT)
    (line,) = caplog.messages
    opened = [name for name, *_ in functions if re.search(rf"\b{name}\b", line)]
    assert 0 < len(opened) < 9 and "f9" not in opened
    for name, _, schema in functions:
        call = GENERIC_FORMAT.write_calls([(name, '{"x": [2]}')])
        assert dfa_accepts(dfa, call.encode()) == (name in opened or "type" in schema)


def test_tools_fit_the_table_of_a_vocabulary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outpace.constraint.automaton.MAX_AUTOMATON_ENTRIES", 50_000)
    log_loosened.cache_clear()
    part = {"type": "string", "maxLength": 64}
    functions = [
        {"name": f"f{n}", "parameters": {"type": "object", "properties": {f"p{n}": part}}}
        for n in range(3)
    ]
    tools = [{"type": "function", "function": each} for each in functions]
    options: Options = {"tools": tools, "tool_choice": "required", "max_tokens": 80}
    (output,) = LLM("tiny-ar", cache_gib=0.01).generate("Tom has 3 apples.", **options)
    assert output.tool_calls and len(caplog.messages) == 1
    tools[0]["function"]["strict"] = True
    monkeypatch.setattr("outpace.constraint.automaton.MAX_AUTOMATON_ENTRIES", 1000)
    with pytest.raises(OptionError, match="too large"):
        LLM("tiny-ar", cache_gib=0.01).generate("Tom has 3 apples.", **options)


def test_descriptions_have_no_limit() -> None:
    part = {"title": "x" * 99_999, "properties": {"title": {"default": "x" * 999}}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"description": part}}}
    use = read_tool_use([{"type": "function", "function": tool}], None, None)
    assert use is not None and len(use.rule) < 999 and '"title": {}' in use.rule


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(10, 200))]
)
def test_lists_of_tools(seed: int) -> None:
    rng = Random(seed)
    drawn = [draw_object(rng, rng.choice([0, 0, 1, 2, 3])) for _ in range(rng.randint(1, 5))]
    tools = []
    for number, (schema, _) in enumerate(drawn):
        schema |= {"type": "object"} | (DEFINITIONS if '"#/' in json.dumps(schema) else {})
        function = {"name": f"f{number}", "parameters": schema}
        tools.append({"type": "function", "function": function})
    use = read_tool_use(tools, "required", None)
    assert use is not None
    dfa = tools_dfa(use.rule, GENERIC_FORMAT)
    for number, (schema, value) in enumerate(drawn):
        call = GENERIC_FORMAT.write_calls([(f"f{number}", json.dumps(value))])
        assert dfa_accepts(dfa, call.encode()), (schema, value)
        try:
            held = arguments_dfa(0, schema, CallBudget())
        except OptionError:
            continue
        for _ in range(20):
            if (found := random_text(held, rng)) is not None:
                jsonschema.Draft202012Validator(schema).validate(json.loads(found))
