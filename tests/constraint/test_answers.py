"""Test constrained answers of zoo models: complete, valid, batch-invariant, lossless."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from constrained import CASES, CAUSAL, DIFFUSION, FIRST, SCHEMAS, llm
from outpace.api.options import Options
from outpace.constraint.compiler import RuleKey
from outpace.constraint.dfa import Dfa
from outpace.methods import (
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
SUITE = [
    each["schema"]
    for each in json.loads((Path(__file__).parent / "schemas.json").read_text())["schemas"]
]


def fulfils(text: str, rule: Options) -> bool:
    """Return whether an answer satisfies its constraint."""
    if "schema" in rule:
        jsonschema.Draft202012Validator(rule["schema"]).validate(json.loads(text))
        return True
    if "regex" in rule:
        return re.fullmatch(str(rule["regex"]), text) is not None
    return text in (rule["choices"] or ())


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*case, id=str(case), marks=[pytest.mark.nightly] * (case not in FIRST))
        for case in CASES
    ],
)
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
    (alone,) = llm(name).generate(QUESTION, **requests[0][1])
    assert alone.ids == together[0].ids


LOSSLESS: list[tuple[str, MethodSpec]] = [
    ("tiny-ar", Speculative(draft="tiny-aux", tokens=3)),
    ("tiny-ar", DFlash(draft="tiny-dflash", tokens=4)),
    ("tiny-ar", Eagle(draft="tiny-eagle", width=3, depth=2, nodes=8)),
    ("tiny-wedlm", WeDLM(verify=True)),
    ("tiny-ar", "auto"),
    ("tiny-ar", Lookup()),
    ("tiny-ar", Lookup(tokens=6, match=2)),
    ("tiny-ar", Lookup(tokens=6, shared=True)),
    ("tiny-ar", Speculative(draft="tiny-aux", lookup=True)),
    ("tiny-ar", Eagle(draft="tiny-eagle", width=3, depth=2, nodes=8, lookup=True)),
]
PENALTIES: list[Options] = [
    {},
    {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    {},
    {"repetition_penalty": 1.3, "logit_bias": {97: -2.0}},
]


def numbered_requests(count: int) -> list[Options]:
    """Return constrained requests of all kinds and unconstrained ones."""
    rules: list[Options] = [*RULES, {"grammar": LARK}, {}]
    return [
        {
            **rules[seed % len(rules)],
            **PENALTIES[seed % len(PENALTIES)],
            "seed": seed,
            "temperature": (0.0, 0.8, 1.2)[seed % 3],
            "max_tokens": 24 + seed % 20,
        }
        for seed in range(count)
    ]


@cache
def autoregressive_outputs(name: str, count: int) -> list[tuple[list[int], str | None, int]]:
    """Return ids, finish reason and forwards of the requests, decoded one token at a time."""
    given = numbered_requests(count)
    served = llm(name).serve((QUESTION, {**each, "method": Autoregressive()}) for each in given)
    found = [output for _, output in sorted(served, key=lambda pair: pair[0])]
    return [(output.ids, output.finish_reason, output.forwards) for output in found]


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(*case, id=str(case), marks=[pytest.mark.nightly] * (number > 3))
        for number, case in enumerate(LOSSLESS)
    ],
)
def test_lossless_methods_stay_lossless(name: str, method: MethodSpec, count: int) -> None:
    given = numbered_requests(count)
    plain = autoregressive_outputs(name, count)
    fast = dict(llm(name).serve((QUESTION, {**each, "method": method}) for each in given))
    for number, (ids, reason, _) in enumerate(plain):
        assert (fast[number].ids, fast[number].finish_reason) == (ids, reason), given[number]
    # Fixed drafts save forwards; where the measured optimum decides, they may be plain.
    if isinstance(method, Method) and getattr(method, "tokens", None) != "auto":
        assert sum(each.forwards for each in fast.values()) < sum(count for _, _, count in plain)


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


COUNTED: list[dict[str, Any]] = [
    {"type": "string", "minLength": 3, "maxLength": 9000},
    {
        "allOf": [{"properties": {"a": {"type": "string", "maxLength": 7000}}, "required": ["a"]}],
        "properties": {"b": {"const": "d"}},
        "required": ["b"],
    },
    {"type": "array", "items": {"enum": ["x", "yes"]}, "minItems": 2, "maxItems": 10**9},
    {"additionalProperties": {"type": "string", "maxLength": 9000}},
]
"""Schemas with counts that are too large for an automaton."""


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(COUNTED)))
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("tiny-ar", CAUSAL[0]),
        pytest.param("tiny-ar", CAUSAL[1], marks=pytest.mark.nightly),
        pytest.param("tiny-dream", DIFFUSION[0], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_large_counts_from_left_to_right(name: str, method: Method, number: int) -> None:
    schema = COUNTED[number]
    options: Options = {"temperature": 2.0 * (number % 2), "max_tokens": 50, "seed": 1}
    (output,) = llm(name).generate(QUESTION, schema=schema, method=method, **options)
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
    token = {text: model.text.tokenizer(text).input_ids[0] for text in ('"', "x")}
    for count, more in ((5999, True), (6000, False)):
        row = torch.zeros(1, len(model.text.tokenizer))
        holds(row, [count + 1], [token['"'], *[token["x"]] * count])
        assert (row[0, token["x"]] == 0) == more and row[0, token['"']] == 0


@pytest.mark.parametrize(("name", "method"), [CASES[0], ("tiny-dream", FastDLLM(block=16))])
def test_special_stop_ids_change_no_constrained_answer(name: str, method: Method) -> None:
    model = llm(name)
    special = sorted(model.text.silent_ids - {model.config.mask_id})
    assert not model.eos >= set(special)
    for rule in RULES:
        common: Options = {"method": method, "max_tokens": 48, **rule}
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
    monkeypatch.setattr(type(model), "eos", frozenset())
    (same,) = model.generate(QUESTION, stop_ids=[end], **common)
    assert (same.ids, same.finish_reason) == (free.ids, "stop")


def expressions() -> list[str]:
    """Return the first hundred supported expressions of CPython's tests, alphabetically."""
    tests = pytest.importorskip("test.re_tests", reason="apt-get install libpython3-testsuite")
    found = []
    for pattern in sorted({test[0] for test in tests.tests}):
        try:
            Dfa.from_pattern(pattern)
        except ValueError:
            continue
        found.append(pattern)
    return found[:100]


@cache
def shortest(name: str, *rule: str) -> int:
    model = llm(name)
    size = len(model.text.tokenizer)
    ends = frozenset({model.text.tokenizer.eos_token_id})
    return model.compiler.compile_rule(RuleKey(rule, False, size, ends), 1000).min_tokens


def fit_blocks(method: Method, room: int) -> tuple[Method, int]:
    """Return a method and a length that it can fill: whole blocks with equal steps."""
    size = getattr(method, "block", None)
    if not isinstance(size, int) or isinstance(size, bool):
        return method, room
    if getattr(method, "canvas", False):  # slots of a partial block stay empty
        room -= room % size
    if isinstance(method, Diffusion):
        method = replace(method, steps=2 * -(-room // size))
    return method, room


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
def test_answers_end_within_twice_the_shortest_length(case: int, temperature: float) -> None:
    name, method = CASES[case]
    rules: list[tuple[Options, str]] = [
        *(({"schema": schema}, json.dumps(schema)) for schema in [*SCHEMAS, *SUITE]),
        *(({"regex": pattern}, pattern) for pattern in expressions()),
    ]
    # Every sixth rule, and different ones for the next method.
    rules = rules[(case + 3 * (temperature > 0)) % 6 :: 6]
    given: list[tuple[str, Options]] = []
    for number, (rule, source) in enumerate(rules):
        fitted, room = fit_blocks(method, 2 * shortest(name, *rule, source) + 40)
        options: Options = {"method": fitted, "max_tokens": room, "seed": number}
        given.append((QUESTION, {**rule, **options, "temperature": temperature}))
    outputs = dict(llm(name).serve(given, batch=16))
    assert len(outputs) == len(rules)
    for number, (rule, _) in enumerate(rules):
        output = outputs[number]
        assert output.finish_reason == "stop" and fulfils(output.text, rule), rule
