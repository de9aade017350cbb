"""Test constrained answers of zoo models: complete, batch-invariant, and refused in time."""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

import jsonschema
import pytest
import torch
from pydantic import BaseModel

from constrained import CASES, CAUSAL, DIFFUSION, llm
from outpace import Hole
from outpace.api.options import Options
from outpace.methods import (
    D2F,
    Autoregressive,
    DFlash,
    Diffusion,
    Eagle,
    FastDLLM,
    Lookup,
    Method,
    Speculative,
    WeDLM,
)
from outpace.methods.options import MethodSpec

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
RULES: list[Options] = [
    {"schema": SCHEMA},
    {"regex": r"[A-Z][a-z]+ has \d{1,3} (apples|pears)\."},
    {"choices": ["yes", "no", "seven apples"]},
]
LARK = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'


def fulfils(text: str, rule: Options) -> bool:
    """Return whether an answer satisfies its constraint."""
    if "schema" in rule:
        jsonschema.Draft202012Validator(rule["schema"]).validate(json.loads(text))
        return True
    if "regex" in rule:
        return re.fullmatch(str(rule["regex"]), text) is not None
    return text in (rule["choices"] or ())


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("name", "method"), CASES, ids=str)
def test_answers_are_complete(name: str, method: Method, temperature: float) -> None:
    common: Options = {"method": method, "max_tokens": 48, "temperature": temperature}
    requests: list[tuple[str, Options]] = [
        (QUESTION, {**common, **rule, "seed": seed})  # type: ignore[typeddict-item]
        for seed, rule in enumerate([*RULES, {}])
    ]
    together = dict(llm(name).serve(requests))
    for number, rule in enumerate(RULES):
        output = together[number]
        assert output.finish_reason == "stop" and fulfils(output.text, rule), output.text
    for number in (0, 3):
        (alone,) = llm(name).generate(QUESTION, **requests[number][1])
        assert alone.ids == together[number].ids


LOSSLESS = [
    ("tiny-ar", Speculative(draft="tiny-aux", tokens=3)),
    ("tiny-ar", DFlash(draft="tiny-dflash", tokens=4)),
    ("tiny-ar", Eagle(draft="tiny-eagle", width=3, depth=2, nodes=8)),
    ("tiny-wedlm", WeDLM(verify=True)),
]
COPYING: list[tuple[str, MethodSpec]] = [
    ("tiny-ar", "auto"),
    ("tiny-ar", Lookup()),
    ("tiny-ar", Lookup(tokens=6, match=2)),
    ("tiny-ar", Lookup(tokens=6, shared=True)),
    ("tiny-ar", Speculative(draft="tiny-aux", lookup=True)),
    ("tiny-ar", Eagle(draft="tiny-eagle", width=3, depth=2, nodes=8, lookup=True)),
]
"""Methods that propose copies; "auto" is a draft with copies here."""

PENALTIES: list[Options] = [
    {},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    {},
    {"repetition_penalty": 1.3, "logit_bias": {97: -2.0}},
]


def same_as_autoregressive(name: str, method: MethodSpec, count: int) -> None:
    """Compare constrained requests of all kinds, together with unconstrained ones.

    Fixed drafts save forwards; where the measured optimum decides, they may be plain.
    """
    rules: list[Options] = [*RULES, {"grammar": LARK}, {}]
    for first in range(0, count, 20):
        each: list[Options] = [
            {
                **rules[seed % len(rules)],
                **PENALTIES[seed % len(PENALTIES)],
                "seed": seed,
                "temperature": (0.0, 0.8, 1.2)[seed % 3],
                "max_tokens": 24 + seed % 20,
            }
            for seed in range(first, first + 20)
        ]
        plain = dict(llm(name).serve((QUESTION, {**o, "method": Autoregressive()}) for o in each))
        fast = dict(llm(name).serve((QUESTION, {**o, "method": method}) for o in each))
        for number, option in enumerate(each):
            assert fast[number].ids == plain[number].ids, option
            assert fast[number].finish_reason == plain[number].finish_reason
        forwards = [sum(output.forwards for output in run.values()) for run in (plain, fast)]
        is_fixed = isinstance(method, Method) and getattr(method, "tokens", None) != "auto"
        assert forwards[1] < forwards[0] or not is_fixed


@pytest.mark.parametrize(
    ("name", "method"),
    [*LOSSLESS, *(pytest.param(*case, marks=pytest.mark.nightly) for case in COPYING)],
    ids=str,
)
def test_lossless_methods_stay_lossless(name: str, method: MethodSpec) -> None:
    same_as_autoregressive(name, method, 20)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "method"), [*LOSSLESS, *COPYING], ids=str)
def test_many_lossless_requests(name: str, method: MethodSpec) -> None:
    same_as_autoregressive(name, method, 300)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("name", "method"),
    [*(("tiny-ar", m) for m in CAUSAL), *(("tiny-dream", m) for m in DIFFUSION[:5])],
    ids=str,
)
def test_grammars_are_followed_from_left_to_right(
    name: str, method: Method, temperature: float
) -> None:
    outputs = llm(name).generate(
        [QUESTION] * 3, method=method, grammar=LARK, max_tokens=12, temperature=temperature
    )
    for output in outputs:
        inner = output.text.strip("(").rstrip(")")
        if output.finish_reason == "stop":
            depth = output.text.count("(")
            assert output.text == "(" * depth + inner + ")" * depth and inner.isdigit()
        else:
            assert output.finish_reason == "length" and set(output.text) <= set("()0123456789")


def test_a_grammar_requires_left_to_right_decoding() -> None:
    with pytest.raises(ValueError, match="^grammar: a grammar is not supported by methods that"):
        llm("tiny-dream").generate(QUESTION, grammar=LARK, method=D2F())


@pytest.mark.parametrize("temperature", [0.0, 5.0])
@pytest.mark.parametrize("schema", ["{ }", '{"type": "object", "maxProperties": 1}'])
def test_a_schema_in_a_grammar_has_bounded_white_space(schema: str, temperature: float) -> None:
    (output,) = llm("tiny-ar").generate(
        QUESTION, grammar=f"start: %json {schema}", max_tokens=40, temperature=temperature, seed=2
    )
    bare = re.sub(r'"(?:[^"\\]|\\.)*"?', '""', output.text)
    assert output.text and not re.search(r"[\t\r\n]|(?<![,:]) ", bare)


LONG: list[dict[str, Any]] = [
    {"type": "string", "minLength": 3, "maxLength": 9000},
    {
        "allOf": [{"properties": {"a": {"type": "string", "maxLength": 7000}}, "required": ["a"]}],
        "properties": {"b": {"const": [1, {"c": "d"}]}},
        "required": ["b"],
    },
    {"type": "array", "items": {"enum": ["x", "yes"]}, "minItems": 2, "maxItems": 10**9},
    {"additionalProperties": {"type": "string", "maxLength": 9000}, "minProperties": 1},
]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(
    ("name", "method"),
    [("tiny-ar", CAUSAL[0]), ("tiny-ar", CAUSAL[1]), ("tiny-dream", DIFFUSION[0])],
    ids=str,
)
def test_large_counts_from_left_to_right(name: str, method: Method, temperature: float) -> None:
    for schema in LONG:
        (output,) = llm(name).generate(
            QUESTION, schema=schema, method=method, temperature=temperature, max_tokens=50, seed=1
        )
        assert output.finish_reason == "stop" and fulfils(output.text, {"schema": schema})


def test_a_large_count_is_exact() -> None:
    schema = {"type": "string", "maxLength": 6000, "minLength": 1}
    model = llm("tiny-ar")
    holds = model.compiler.build_constraint(
        ("schema", json.dumps(schema)),
        sequential=True,
        begin=0,
        limit=7000,
        size=len(model.text.tokenizer),
        ends=frozenset({model.text.tokenizer.eos_token_id}),
    )
    token = {text: model.text.tokenizer.encode(text)[0] for text in ('"', "x")}
    for count, more in ((5999, True), (6000, False)):
        row = torch.zeros(1, len(model.text.tokenizer))
        holds(row, [count + 1], [token['"'], *[token["x"]] * count])
        assert (row[0, token["x"]] == 0) == more and row[0, token['"']] == 0


def test_a_pydantic_model_is_a_schema() -> None:
    class Person(BaseModel):
        name: str
        age: int

    for name in ("tiny-ar", "tiny-dream"):
        (output,) = llm(name).generate(QUESTION, schema=Person, max_tokens=40)
        assert Person.model_validate_json(output.text).name is not None


def test_too_long_answers_are_refused() -> None:
    for name in ("tiny-ar", "tiny-dream"):
        with pytest.raises(
            ValueError, match=r"^regex: the shortest answer takes 12 tokens, but max_tokens=11$"
        ):
            llm(name).generate(QUESTION, regex=r"x{12}\u2603*|[xy]{30,}", max_tokens=11)
        (output,) = llm(name).generate(QUESTION, regex=r"x{12}\u2603*|[xy]{30,}", max_tokens=12)
        assert output.text == "x" * 12 and output.finish_reason == "stop"


def test_far_too_long_rules_are_not_compiled() -> None:
    long, model = r"[\s\S]{4000}", llm("tiny-dream")
    message = "its shortest text has 400. characters, but there is room for 16 tokens of 9 bytes"
    begun = time.process_time()
    with pytest.raises(ValueError, match=f"^regex: {message}"):
        model.generate(QUESTION, regex=long, max_tokens=16)
    with pytest.raises(ValueError, match=f"^schema: {message}"):
        model.generate(QUESTION, schema={"type": "string", "minLength": 4000}, max_tokens=16)
    with pytest.raises(ValueError, match=f"^holes.0.: {message}"):
        model.fill(["Say ", Hole(16, regex=long)])
    assert time.process_time() - begun < 6
    # Rules that may fit are compiled.
    with pytest.raises(ValueError, match="^regex: the shortest answer takes 144 tokens, but"):
        model.generate(QUESTION, regex="[0-9]{144}", max_tokens=16)


def deep(levels: int) -> dict[str, Any]:
    """Return nested arrays."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema, "type": "array"}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """Return definitions that each use the next one twice, of which nothing remains."""
    each = [{"type": "array", "maxItems": 0, "items": {"$ref": f"#/$defs/{n}"}} for n in range(99)]
    defs: dict[str, Any] = {str(n): {"anyOf": [each[n + 1]] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(levels): {"type": "null"}}}


SETS = "".join(f"[a{chr(0x4E00 + number)}]?" for number in range(5000))
MANY = [f"{number * 7919 % 100_003:06d}" for number in range(100_000)]
HUGE = "must be a number of at most 40 digits"
BAD: list[tuple[Any, str]] = [
    ({"regex": "(a|b)*a(a|b){25}"}, "^regex: it is too large: its automaton has too many"),
    ({"regex": "((a{0,999}){0,999}){0,999}"}, "^regex: it is too large"),
    ({"regex": "((a{1000}){1000}){1000}"}, "^regex: its shortest text has 1000000000 char"),
    ({"regex": "(" * 5000 + ")" * 5000}, "^regex: it is too large: its groups are nested"),
    ({"regex": SETS}, "^regex: it is too large: more than 50 sets of characters"),
    ({"regex": r"(\w\d\s.){0,999}"}, "^regex: it is too large"),
    ({"regex": "[ab"}, "^regex: it is malformed: unterminated character set"),
    ({"regex": r"(a)\1"}, "^regex: a back-reference is not supported"),
    ({"regex": r"(?=a)b"}, "^regex: look-around is not supported"),
    ({"regex": r"\bfoo"}, r"^regex: the word boundary \\b is not supported"),
    ({"regex": r"[^\s\S]"}, "^regex: no text matches it"),
    ({"regex": "x" * 10**6}, "^regex: it is too large: 1000000 characters"),
    ({"regex": 5}, "^regex must be a string"),
    ({"schema": {"enum": ["x" * 10**6]}}, "^schema: it is too large"),
    ({"schema": deep(5000)}, "^schema.* is too large: it is nested too deeply"),
    ({"schema": deep(150)}, "^schema: it is too large: it is nested more than 100 deep"),
    ({"schema": {"pattern": "a)|(b"}}, r"^schema: pattern 'a\)\|\(b' at # is malformed: unb"),
    ({"schema": {"minimum": math.inf}}, f"^schema: minimum at # {HUGE}"),
    ({"schema": {"maximum": -(10**400)}}, f"^schema: maximum at # {HUGE}"),
    ({"schema": {"multipleOf": math.nan}}, f"^schema: multipleOf at # {HUGE}"),
    ({"schema": {"items": {"enum": [1, -math.inf]}}}, f"^schema: 1 at #/items/enum {HUGE}"),
    ({"schema": {"x": 10**5000}}, "^schema must be JSON"),
    ({"schema": {"enum": []}}, "^schema: no text matches it"),
    ({"schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "^schema: no text matches it"),
    ({"schema": {"type": "teapot"}}, "^schema: 'teapot' at # is not a type"),
    ({"schema": {"type": [["null"]]}}, r"^schema: \['null'\] at # is not a type"),
    ({"schema": {"oneOf": [{"type": [[]]}, {}]}}, r"^schema: \[\] at #/oneOf/0 is not a type"),
    ({"schema": {"oneOf": [{"minimum": 1}, {}]}}, "^schema: oneOf at # is not supported"),
    ({"schema": {"oneOf": [{"type": f"t{n}"} for n in range(4000)]}}, "^schema: 't0' at #/oneOf"),
    ({"schema": {"format": []}}, r"^schema: format at # is invalid: \[\]"),
    ({"schema": {"required": [["a"]]}}, r"^schema: required at # is invalid: \['a'\]"),
    ({"schema": {"type": "array", "items": 3}}, "^schema: 3 at #/items is not a schema"),
    ({"schema": {1: {2: object()}}}, "^schema must be JSON"),
    ({"schema": [1]}, "^schema must be a JSON schema"),
    ({"choices": []}, "^choices must be a non-empty list of strings, got"),
    ({"choices": ["a", 1]}, "^choices\\[1\\] must be a string, got 1$"),
    ({"choices": MANY}, "^choices: it is too large: .* at most 100000 are allowed"),
    ({"choices": [n[::-1] * 2 for n in MANY[:5000]]}, "^choices: it is too large: texts that"),
    ({"choices": ["\ud800"]}, "^choices: .* surrogates not allowed"),
    ({"grammar": "start: )("}, "^grammar: "),
    ({"regex": "a", "choices": ["a"]}, "^choices and regex are two constraints; give one"),
    ({"regex": "a", "stop": "b"}, "^stop cannot be combined with regex"),
    ({"regex": "a", "ignore_eos": True}, "^ignore_eos cannot be combined with regex"),
    ({"choices": ["a"], "min_tokens": 3}, "^min_tokens cannot be combined with choices"),
    (
        {"regex": "a", "stop_ids": [65]},
        "^stop_ids cannot be combined with regex .* may hold token 65",
    ),
]
BAD_FOR_CANVASES: list[tuple[Any, str]] = [
    *BAD[:-6],
    ({"schema": doubling(14)}, "^schema: it is too large: it has more than 20000 values"),
    (
        {"schema": {"type": "object", "properties": {str(n): {} for n in range(5000)}}},
        "^schema: it is too large: more than 60000 states",
    ),
    ({"schema": {"type": "string", "maxLength": 10**9}}, "^schema: it is too large"),
    ({"schema": {"type": "array", "minItems": 10**12}}, "^schema: its shortest text has 2000"),
]


def refused(name: str, options: Any, message: str) -> None:
    """Assert that options are refused within a second of processor time.

    Other tests slow the processor down, so that the measurement may be repeated.
    """
    model = llm(name)
    for last in (False, False, True):
        began = time.process_time()
        with pytest.raises(ValueError, match=message):
            model.submit(QUESTION, **options)
        taken = time.process_time() - began
        if taken < 1 or last:
            break
    assert taken < 1
    assert not model.driver.inbox


@pytest.mark.parametrize(("options", "message"), BAD, ids=[each[1] for each in BAD])
def test_bad_input_is_refused_in_time(options: Any, message: str) -> None:
    refused("tiny-ar", options, message)


@pytest.mark.parametrize(
    ("options", "message"), BAD_FOR_CANVASES, ids=[each[1] for each in BAD_FOR_CANVASES]
)
def test_bad_input_of_canvases_is_refused_in_time(options: Any, message: str) -> None:
    refused("tiny-dream", {"method": FastDLLM(), **options}, message)


def test_other_too_large_schemas_are_refused() -> None:
    for name in ("tiny-ar", "tiny-dream"):
        refused(name, {"schema": {"maxProperties": 10**9}}, "^schema: it is too large: more than")


def test_repeats_of_empty_texts_are_empty() -> None:
    began = time.process_time()
    (output,) = llm("tiny-ar").generate(QUESTION, regex="(?:){999999999}x(?:){2,999999999}")
    assert output.text == "x" and time.process_time() - began < 6


@pytest.mark.parametrize(("name", "method"), [CASES[0], ("tiny-dream", FastDLLM(block=16))])
def test_special_stop_ids_change_no_constrained_answer(name: str, method: Method) -> None:
    model = llm(name)
    special = sorted(model.text.silent_ids - {model.config.mask_id})
    assert not model.eos >= set(special)
    for rule in RULES:
        common: Options = {"method": method, "max_tokens": 80, **rule}
        (free,) = model.generate(QUESTION, **common)
        (same,) = model.generate(QUESTION, stop_ids=special, **common)
        assert (same.ids, same.text, same.finish_reason) == (free.ids, free.text, "stop")


def test_stop_ids_end_constrained_answers_of_a_model_without_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llm("tiny-ar")
    (end,) = model.eos
    common: Options = {"max_tokens": 80, **RULES[1]}
    (free,) = model.generate(QUESTION, **common)
    monkeypatch.setattr(model, "eos", frozenset())
    (same,) = model.generate(QUESTION, stop_ids=[end], **common)
    assert (same.ids, same.finish_reason) == (free.ids, "stop")
    with pytest.raises(ValueError, match="^regex: a constraint requires an end-of-sequence"):
        model.generate(QUESTION, **common)


@pytest.mark.parametrize(
    ("name", "method"),
    [("tiny-ar", Autoregressive()), ("tiny-ar", CAUSAL[1]), ("tiny-dream", Diffusion())],
    ids=str,
)
def test_choices_may_begin_alike(name: str, method: Method) -> None:
    choices = ["", "a", "ab", "abcd", "Tom", "Tom has"]
    options: Options = {"method": method, "choices": choices, "temperature": 30.0, "top_p": 1.0}
    asked = ((QUESTION, {**options, "max_tokens": 12, "seed": seed}) for seed in range(120))
    found = {output.text for _, output in llm(name).serve(asked)}
    assert found <= set(choices)
    assert found == set(choices) or not method.is_sequential


def test_a_constraint_is_compiled_once() -> None:
    model = llm("tiny-ar")
    model.generate([1, 2], schema=SCHEMA, max_tokens=40)
    began = time.process_time()
    for _ in range(100):
        model.prepare([1, 2], schema=SCHEMA, max_tokens=40)
    assert (time.process_time() - began) / 100 < 1e-2
