"""Answers by schemas end within twice the shortest length plus 40 tokens, with every method."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from constrained import CASES, llm
from outpace.api.options import Options
from outpace.constraint.compiler import RuleKey
from outpace.methods import Diffusion, Method

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
SUITE = json.loads((Path(__file__).parent / "schemas.json").read_text())["schemas"]

OPEN: dict[str, Any] = {"type": "object"}
NODE = {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}, "v": {"type": "null"}}}
TAGGED = [
    {"type": "object", "properties": {"t": {"const": "x"}, "n": {}}, "required": ["t"]},
    {"type": "object", "properties": {"t": {"const": "y"}, "m": OPEN}, "required": ["t", "m"]},
]
SCHEMAS: list[Any] = [
    OPEN,
    {},
    {"type": "string"},
    {"type": "array"},
    {"type": "integer"},
    {"type": "number"},
    {"type": ["integer", "number"], "minimum": 0, "maximum": 3},
    {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0.25},
    {"type": "number", "minimum": 0},
    {"type": "integer", "multipleOf": 7, "minimum": 100},
    {"type": "number", "multipleOf": 0.25},
    {"not": {"enum": [1, "a", None, True]}},
    {"type": "string", "not": {"const": ""}},
    {"type": ["string", "null"], "not": {"type": "null"}},
    {"type": "string", "minLength": 3},
    {"type": "string", "maxLength": 40},
    {"type": "string", "pattern": r"^\d{2}"},
    {"type": "string", "pattern": r"\w\s\w", "maxLength": 30},
    {"type": "string", "format": "uri"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv6"},
    {"patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": False},
    {"patternProperties": {"^x": {"type": "integer"}, "y$": {"minimum": 1}}, "minProperties": 1},
    {"type": "object", "maxProperties": 2},
    {"type": "object", "minProperties": 1},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "minProperties": 1},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}},
        "dependentRequired": {"a": ["b", "c"]},
        "minProperties": 1,
    },
    {
        "type": "object",
        "properties": {name: {"type": "string"} for name in "abcdefghijkl"},
        "maxProperties": 3,
    },
    {"type": "object", "properties": {f"name {n}": {"type": "number"} for n in range(60)}},
    {"type": "array", "items": {"type": "string"}, "minItems": 2},
    {"type": "array", "items": {"enum": ["red", "blue", 1]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "maxItems": 9},
    {"oneOf": TAGGED},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, OPEN]},
    {"allOf": [TAGGED[0], {"properties": {"n": {"type": "string"}}, "required": ["n"]}]},
    {"type": "object", "properties": {"a": OPEN}, "anyOf": [{"required": ["a"]}, {"minimum": 3}]},
    {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
    {"enum": [{"a": [1, 2]}, "text", 3.5, None]},
    *(each["schema"] for each in SUITE[::5]),
]


@cache
def shortest(name: str, text: str) -> int:
    """Return the tokens of the shortest answer by a schema."""
    model = llm(name)
    vocabulary = len(model.text.tokenizer)
    ends = frozenset({model.text.tokenizer.eos_token_id})
    rule = "schema", text
    return model.compiler.compile_rule(RuleKey(rule, False, vocabulary, ends), 1000).min_tokens


def fitting(method: Method, room: int) -> tuple[Method, int]:
    """Return a method and a length that it can fill: whole blocks with equal steps."""
    size = getattr(method, "block", None)
    if not isinstance(size, int) or isinstance(size, bool):
        return method, room
    if getattr(method, "canvas", False):  # slots of a partial block stay empty
        room -= room % size
    if isinstance(method, Diffusion):
        method = replace(method, steps=2 * -(-room // size))
    return method, room


def check_length(name: str, method: Method, temperature: float, schemas: list[Any]) -> None:
    """Assert that every answer ends by itself and is valid."""
    asked: list[tuple[str, Options]] = []
    for number, schema in enumerate(schemas):
        fitted, room = fitting(method, 2 * shortest(name, json.dumps(schema)) + 40)
        options: Options = {"schema": schema, "method": fitted, "max_tokens": room}
        asked.append((QUESTION, {**options, "temperature": temperature, "seed": number}))
    answered = 0
    for number, output in llm(name).serve(asked, batch=16):
        assert output.finish_reason == "stop", (schemas[number], output.text)
        value = json.loads(output.text)
        jsonschema.Draft202012Validator(schemas[number]).validate(value)
        answered += 1
    assert answered == len(schemas)


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(("name", "method"), CASES, ids=str)
def test_answers_end_in_time(name: str, method: Method, temperature: float) -> None:
    assert len(SCHEMAS) >= 60
    check_length(name, method, temperature, SCHEMAS)


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("case", range(0, len(CASES), 4))
def test_some_answers_end_in_time(case: int, temperature: float) -> None:
    check_length(*CASES[case], temperature, SCHEMAS[case % 10 :: 10])
