"""Run public test suites: a hundred schemas and a hundred expressions with every method."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest

from outpace import LLM
from outpace.api.options import Options
from outpace.constraint.dfa import Dfa
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    DFlash,
    Diffusion,
    FastDLLM,
    LeftToRight,
    Method,
    Speculative,
    WeDLM,
)

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
SCHEMAS = json.loads((Path(__file__).parent / "schemas.json").read_text())["schemas"]
ROOM, TURNS = 48, 10
"""Maximum tokens of an answer; this many cases cover all rules."""


def expressions() -> list[str]:
    """Return the first hundred supported expressions of CPython's tests, alphabetically."""
    tests = pytest.importorskip("test.re_tests").tests
    found = []
    for pattern in sorted({test[0] for test in tests}):
        try:
            Dfa.from_pattern(pattern)
        except ValueError:
            continue
        found.append(pattern)
    assert len(found) >= 100
    return found[:100]


CASES: list[tuple[str, Method]] = [
    ("tiny-ar", Autoregressive()),
    ("tiny-ar", Speculative(draft="tiny-aux", tokens=4)),
    ("tiny-ar", DFlash(draft="tiny-dflash", tokens=4)),
    ("tiny-dream", LeftToRight(tokens=2)),
    ("tiny-dream", APD(verifier="tiny-aux")),
    ("tiny-dream", Diffusion(steps=24)),
    ("tiny-dream", FastDLLM(block=16)),
    ("tiny-d2f", D2F()),
    ("tiny-wedlm", WeDLM()),
    ("tiny-wedlm", WeDLM(verify=True)),
]


@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
def test_answers_of_suites_are_valid(case: int, temperature: float) -> None:
    """Every answer is complete and valid; nearly all fit into half of the length.

    Each case has every tenth rule, shifted by one and at the other temperature in the next case.
    """
    name, method = CASES[case]
    llm = LLM(name, method)
    rules: list[Options] = [{"schema": each["schema"]} for each in SCHEMAS]
    rules += [{"regex": pattern} for pattern in expressions()]
    rules = rules[(case + (temperature > 0)) % TURNS :: TURNS]
    common: Options = {"max_tokens": ROOM, "temperature": temperature}
    served = llm.serve(
        ((QUESTION, {**common, **rule, "seed": n}) for n, rule in enumerate(rules)), batch=16
    )
    finished = 0
    for number, output in served:
        rule = rules[number]
        assert output.finish_reason == "stop", rule
        finished += 1
        if "schema" in rule:
            value = json.loads(output.text)
            jsonschema.Draft202012Validator(rule["schema"]).validate(value)
        else:
            assert re.fullmatch(str(rule["regex"]), output.text), rule
    assert finished == len(rules) == 20
