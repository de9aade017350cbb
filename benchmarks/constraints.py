"""What it costs to hold answers to a JSON schema: overhead of each method, drafts, compiling.

Questions of the test split are answered 16 at a time, freely and by a schema, in turns; both sides
go on up to the limit of tokens. A constrained answer says other things, so that drafts are kept
and holes are filled at another pace: shown as tokens per forward. Overhead is therefore measured
twice: as the CPU time of a forward beside a free one, and as the share of CPU time that is spent in
the constraint itself, which is what tokens per second lose and what the bar is on.

A schema of 2 kB is compiled for a made-up byte-level vocabulary of 152,064 tokens, whose tree is
built once for each model.

    python benchmarks/constraints.py --json benchmarks/results/constraints.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE

from checkpoints import load
from harness import Bar, Row, alternate, arguments, finish, median, prepare, ratio, save, show
from outpace import LLM
from outpace.api.options import Options
from outpace.api.output import Output
from outpace.constraint.compiler import Compiler
from outpace.constraint.regular import RegularConstraint, TokenLanguage
from outpace.lab.run import questions_of
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
from outpace.tokenizer import Tokenizer, byte_alphabet

SHARE = 0.15
"""Of the CPU time, in a constraint."""

COLD, CACHED = 3.0, 1e-3
"""Seconds to compile a schema, and to look it up."""

VOCABULARY = 152_064

CASES: dict[str, tuple[str, Method]] = {
    "autoregressive": ("tiny-ar", Autoregressive()),
    "speculative": ("tiny-ar", Speculative(draft="tiny-aux", tokens=4)),
    "DFlash": ("tiny-ar", DFlash(draft="tiny-dflash", tokens=8)),
    "left to right": ("tiny-dream", LeftToRight(tokens=2, window=16, lookahead=16)),
    "APD": ("tiny-dream", APD(verifier="tiny-aux", window=16, lookahead=16)),
    "diffusion": ("tiny-dream", Diffusion(steps=24)),
    "LLaDA's order": ("tiny-llada", Diffusion(block=8)),
    "Fast-dLLM": ("tiny-dream", FastDLLM(block=16)),
    "D2F": ("tiny-d2f", D2F()),
    "WeDLM": ("tiny-wedlm", WeDLM()),
    "WeDLM, verified": ("tiny-wedlm", WeDLM(verify=True)),
}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "text": {"type": "string"},
    },
    "required": ["name", "count", "text"],
}


@dataclass(slots=True)
class Side:
    """Answers all questions, freely or by the schema; the last answers are kept."""

    llm: LLM
    prompts: list[Any]
    options: Options
    outputs: list[Output] = field(default_factory=list)

    def __call__(self) -> None:
        """Once."""
        self.outputs = self.llm.generate(self.prompts, **self.options)

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(len(output.ids) for output in self.outputs)

    @property
    def forwards(self) -> int:
        """Of all answers."""
        return sum(output.forwards for output in self.outputs)


@contextmanager
def clocked() -> Iterator[Callable[[], float]]:
    """A clock of the CPU seconds that constraints take."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            began = time.process_time()
            try:
                return function(*given)
            finally:
                spent[0] += time.process_time() - began

        return run

    names = ("__call__", "choose_jointly", "check")
    patches: dict[str, Any] = {name: timed(getattr(RegularConstraint, name)) for name in names}
    with mock.patch.multiple(RegularConstraint, **patches):
        yield lambda: spent[0]


def share(side: Side) -> float:
    """Share of the CPU time of a run that its constraints take."""
    with clocked() as clock:
        began = time.process_time()
        side()
        return clock() / (time.process_time() - began)


def overhead(name: str, options: argparse.Namespace) -> Row:
    """One method, with and without the schema."""
    model, method = CASES[name]
    prompts = [question.prompt for question in questions_of("story", options.batch)]
    common: Options = {"method": method, "max_tokens": options.tokens}
    if options.temperature is not None:
        common["temperature"] = options.temperature
    llm = load(model, method)
    free = Side(llm, prompts, {**common, "ignore_eos": True})
    held = Side(llm, prompts, {**common, "schema": SCHEMA})
    timings = alternate({"free": free, "held": held}, options.rounds)
    assert all(output.finish_reason == "stop" for output in held.outputs)
    return {
        "method": name,
        "model": model,
        "tokens per forward, free": free.tokens / free.forwards,
        "by schema": held.tokens / held.forwards,
        "tokens per second, free": free.tokens / median(timings["free"]),
        "constrained": held.tokens / median(timings["held"]),
        "CPU of a forward, ratio": ratio(timings["held"], timings["free"])
        * (free.forwards / held.forwards),
        "share of constraint": statistics.median(share(held) for _ in range(options.rounds)),
    }


def made_up(size: int) -> Tokenizer:
    """A byte-level tokenizer of words, punctuation, numbers and ideographs; the last token ends."""
    rng = Random(0)
    shown = {byte: letter for letter, byte in byte_alphabet().items()}
    syllables = [a + b + c for a in "bcdfghklmnprstvw" for b in "aeiou" for c in ("", *"nrst")]
    signs = "{}[]():;,.'\"!?<>=+-*/\\_#@&|"

    def text() -> str:
        match rng.choices(range(5), (70, 10, 10, 5, 5))[0]:
            case 0:
                word = "".join(rng.choices(syllables, k=rng.randint(1, 4)))
                return rng.choice(("", " ", " ")) + rng.choice((word, word, word.capitalize()))
            case 1:
                return rng.choice(("", " ")) + "".join(rng.choices(signs, k=rng.randint(2, 4)))
            case 2:
                return "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(rng.randint(1, 3)))
            case 3:
                return "".join(chr(rng.randint(0x430, 0x44F)) for _ in range(rng.randint(2, 8)))
        return str(rng.randint(0, 999)) + rng.choice(("", "", ".", "%"))

    known = dict.fromkeys(shown[byte] for byte in range(256))
    while len(known) < size - 1:
        known["".join(shown[byte] for byte in text().encode())] = None
    vocabulary = {name: number for number, name in enumerate([*known, "<end>"])}
    backend = Backend(BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {"eos_token": "<end>"})


def long_schema(size: int) -> str:
    """A schema of so many characters, like those of tools: records with fields of all sorts."""
    rng = Random(0)
    found: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 5000},
        {"enum": ["open", "closed", "waiting", "rejected"]},
        {"type": "boolean"},
        {"type": "array", "items": {"type": "number"}, "maxItems": 8},
        {"type": "string", "format": "date-time"},
        {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    ]
    while len(json.dumps(found)) < size:
        name = f"{rng.choice(('order', 'customer', 'item', 'total'))}_{len(found['properties'])}"
        found["properties"][name] = kinds[len(found["properties"]) % len(kinds)]
        found["required"] += [name] if rng.random() < 0.7 else []
    return json.dumps(found)


def compiling(size: int) -> Row:
    """Seconds to read a schema for a large vocabulary, the first time and then."""
    tokenizer = made_up(size)
    ends = frozenset({size - 1})
    given: dict[str, Any] = {"sequential": False, "begin": 0, "limit": 4096, "ends": ends}
    compiler, rule = Compiler(tokenizer, None), ("schema", long_schema(2000))
    began = time.process_time()
    compiler.token_vocabulary(size)
    tree = time.process_time() - began
    compiler.build_constraint(rule, size=size, **given)
    cold = time.process_time() - began - tree
    began = time.process_time()
    for _ in range(100):
        compiler.build_constraint(rule, size=size, **given)
    cached = (time.process_time() - began) / 100
    (language,) = compiler.compiled_rules.values()
    assert isinstance(language, TokenLanguage)
    states, classes = language.automaton.table.shape
    return {
        "vocabulary": size,
        "characters": len(rule[1]),
        "states": states,
        "classes": classes,
        "tree of tokens, s": tree,
        "compile, s": cold,
        "cached, s": cached,
    }


def main() -> None:
    """Measure all cases."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens (48)")
    parser.add_argument("--batch", type=int, default=16, help="requests (16)")
    parser.add_argument("--temperature", type=float, help="of all (the model's own)")
    parser.add_argument("--methods", nargs="+", choices=CASES, default=list(CASES), help="which")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"({VOCABULARY})")
    options = parser.parse_args()
    prepare(options)
    compiled = compiling(options.vocabulary)
    bars = [
        Bar(what="compile a schema of 2 kB, s", value=compiled["compile, s"], limit=COLD),
        Bar(what="look it up, s", value=compiled["cached, s"], limit=CACHED),
    ]
    show("compiling", [compiled])
    rows: list[Row] = []
    tables = {"compiling": [compiled], "overhead": rows}
    for name in options.methods:
        rows.append(overhead(name, options))
        what = f"{name}: share of constraint"
        bars.append(Bar(what=what, value=rows[-1]["share of constraint"], limit=SHARE))
        save(options, tables, bars)
    show("overhead", rows)
    finish(options, tables, bars)


if __name__ == "__main__":
    main()
