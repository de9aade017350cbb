"""Models of the zoo with methods of all kinds for constraints, and random texts of automata."""

from random import Random
from typing import Any

from outpace import LLM
from outpace.constraint.dfa import Dfa
from outpace.methods import (
    APD,
    D2F,
    Autoregressive,
    BlockDiffusion,
    DFlash,
    Diffusion,
    Eagle,
    FastDLLM,
    LeftToRight,
    Method,
    Speculative,
    WeDLM,
)
from workload import Case, further

CAUSAL: list[Method] = [
    Autoregressive(),
    Speculative(draft="tiny-aux", tokens=3),
    Speculative(draft="tiny-aux", tokens=3, verify="rejection"),
    DFlash(draft="tiny-dflash", tokens=4),
    Eagle(draft="tiny-eagle", width=3, depth=2, nodes=8),
]
DIFFUSION: list[Method] = [
    LeftToRight(tokens=3),
    LeftToRight(tokens=2, window=8, lookahead=8),
    APD(verifier="tiny-aux"),
    APD(verifier="tiny-aux", ratio=1.0),
    APD(verifier="tiny-aux", ratio=0.0, coupling="argmax"),
    Diffusion(),
    Diffusion(block=16, steps=12, canvas=True),
    Diffusion(block=12, steps=12, order="random"),
    Diffusion(ends="last"),
    FastDLLM(block=16),
    FastDLLM(block=12, cache="prefix", factor=1.0),
    FastDLLM(block=24, cache=None, budget=0.5, canvas=True),
    D2F(),
    D2F(block=8, canvas=True),
]
FILLING: list[Method] = [
    WeDLM(),
    WeDLM(eager=False, clip=True),
    WeDLM(block=True, window=8),
    WeDLM(verify=True),
]
CASES: list[Case] = [
    *(("tiny-ar", method) for method in CAUSAL),
    *(("tiny-dream", method) for method in DIFFUSION),
    *(("tiny-llada", method) for method in DIFFUSION if not isinstance(method, APD)),
    *(("tiny-wedlm", method) for method in FILLING),
    ("tiny-d2f", D2F()),
    ("tiny-block", BlockDiffusion()),
    ("tiny-block", BlockDiffusion(budget=1.0, part=3, canvas=True)),
    ("tiny-block", BlockDiffusion(verify=True)),
    ("tiny-llada", Diffusion(guidance=0.5)),
]
CASES += further(CASES)
"""Every registered method, some with several options."""
FIRST = [*{type(method): (name, method) for name, method in reversed(CASES)}.values()]
"""The first case of each method."""

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
    {"type": "number"},
    {"type": ["integer", "number"], "minimum": 0, "maximum": 3},
    {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0.25},
    {"type": "integer", "multipleOf": 7, "minimum": 100},
    {"type": "string", "minLength": 3},
    {"type": "string", "maxLength": 40},
    {"type": "string", "pattern": r"\w\s\w", "maxLength": 30},
    {"type": "string", "format": "uri"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv6"},
    {"type": "object", "properties": dict.fromkeys("abcdefghijkl", {})},
    {"type": "object", "properties": {f"name {n}": {"type": "number"} for n in range(60)}},
    {"type": "array", "items": {"enum": ["red", "blue", 1]}, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "minItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "maxItems": 9},
    {"oneOf": TAGGED},
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, OPEN]},
    {"allOf": [TAGGED[0], {"properties": {"n": {"type": "string"}}, "required": ["n"]}]},
    {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
    {"enum": ["text", 3.5, None]},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]},
    {"type": "integer", "exclusiveMinimum": 3.5, "maximum": 1e3},
    {"type": "string", "pattern": "^a.+[^x]$"},
    {"type": "array", "items": {"type": "string", "pattern": "^(a|b){2}$|^c"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, {"const": 'b"c'}]},
    {"type": "object", "properties": {'a.b"c': {"type": "null"}, "é": {"const": "k"}}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["z", "a"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"allOf": [{"items": {"$ref": "#"}, "maxItems": 2}]},
    *({"type": "string", "format": name} for name in ("time", "uuid", "email")),
]
"""Schemas that together have all keywords."""

_loaded: dict[str, LLM] = {}


def llm(name: str) -> LLM:
    """A model of the zoo, loaded once."""
    if name not in _loaded:
        _loaded[name] = LLM(name)
    return _loaded[name]


def random_text(dfa: Dfa, rng: Random) -> bytes | None:
    """Return a random accepted text, or None if none was found in time."""
    state, text, following = 0, bytearray(), dict[int, list[int]]()
    for _ in range(600):
        if state not in following:
            following[state] = (dfa.table[state] >= 0).nonzero()[0].tolist()
        if dfa.accepts[state] and (not following[state] or rng.random() < 0.3):
            return bytes(text)
        text.append(rng.choice(following[state]))
        if rng.random() < 0.4 and (ends := [b for b in following[state] if chr(b) in '"]}']):
            text[-1] = rng.choice(ends)
        state = int(dfa.table[state, text[-1]])
    return None
