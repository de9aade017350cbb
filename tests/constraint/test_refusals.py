"""Test what a constraint compiler refuses, requires and caches."""

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.models import BPE, WordLevel

from constrained import llm
from outpace import Hole, OptionError
from outpace.constraint import compiler, dfa, tools
from outpace.constraint.calls import GENERIC_FORMAT
from outpace.constraint.compiler import Compiler, NotCompiledError
from outpace.constraint.dfa import Dfa, DfaCache
from outpace.constraint.tools import tools_dfa
from outpace.decoding import FULL, Decoding, Forward, Kind, Request
from outpace.engine.job import DecodingError
from outpace.methods import D2F, FastDLLM, Method
from outpace.tokenizer import Tokenizer
from refusal import refuses

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema, "type": "array"}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """Return definitions that each use the next one twice, of which nothing remains."""
    each = [{"type": "array", "maxItems": 0, "items": {"$ref": f"#/$defs/{n}"}} for n in range(99)]
    defs: dict[str, Any] = {str(n): {"anyOf": [each[n + 1]] * 2} for n in range(levels)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(levels): {"type": "null"}}}


def chain(count: int, link: str = "{}", name: str = "r{}", last: str = '"b"') -> str:
    """A grammar whose rules or terminals refer to one another in a chain."""
    links = (link.format(name.format(number + 1)) for number in range(count))
    rules = [f"{name.format(number)}: {link}" for number, link in enumerate(links)]
    return "\n".join([f"start: {name.format(0)}", *rules, f"{name.format(count)}: {last}"])


def growing(levels: int, name: str = "{}") -> str:
    """Return a grammar with a schema that doubles at each level where it is expanded."""
    names = [name.format(number) for number in range(levels + 1)]
    refs = [f"#/$defs/{each.replace('/', '~1')}" for each in names]
    defs: dict[str, Any] = {
        each: {"prefixItems": [{"minItems": 1, "$ref": ref}] * 2}
        for each, ref in zip(names, refs[1:], strict=False)
    }
    whole = {"$ref": refs[0], "$defs": {**defs, names[-1]: {"type": "array"}}}
    return f"start: %json {json.dumps(whole)}"


SETS = "".join(f"[a{chr(0x4E00 + number)}]?" for number in range(5000))
MANY = [f"{number * 7919 % 100_003:06d}" for number in range(100_000)]
BAD: list[tuple[str, Any]] = [
    ("regex", "(a|b)*a(a|b){25}"),
    ("regex", "((a{0,999}){0,999}){0,999}"),
    ("regex", "((a{1000}){1000}){1000}"),
    ("regex", "(" * 5000 + ")" * 5000),
    ("regex", SETS),
    ("regex", r"(\w\d\s.){0,999}"),
    ("regex", "[ab"),
    ("regex", r"(a)\1"),
    ("regex", r"(?=a)b"),
    ("regex", r"\bfoo"),
    ("regex", r"[^\s\S]"),
    ("regex", "x" * 10**6),
    ("regex", 5),
    ("schema", {"enum": ["x" * 10**6]}),
    ("schema", deep(5000)),
    ("schema", deep(150)),
    ("schema", {"pattern": "a)|(b"}),
    ("schema", {"minimum": math.inf}),
    ("schema", {"maximum": -(10**400)}),
    ("schema", {"multipleOf": math.nan}),
    ("schema", {"items": {"enum": [1, -math.inf]}}),
    ("schema", {"x": 10**5000}),
    ("schema", {"enum": []}),
    ("schema", {"type": "string", "minLength": 3, "maxLength": 2}),
    ("schema", {"type": "teapot"}),
    ("schema", {"type": [["null"]]}),
    ("schema", {"oneOf": [{"type": [[]]}, {}]}),
    ("schema", {"oneOf": [{"minimum": 1}, {}]}),
    ("schema", {"oneOf": [{"type": f"t{n}"} for n in range(4000)]}),
    ("schema", {"format": []}),
    ("schema", {"required": [["a"]]}),
    ("schema", {"type": "array", "items": 3}),
    ("schema", {1: {2: object()}}),
    ("schema", [1]),
    ("choices", []),
    ("choices[1]", ["a", 1]),
    ("choices", MANY),
    ("choices", [n[::-1] * 2 for n in MANY[:5000]]),
    ("choices", ["\ud800"]),
    ("grammar", "start: )("),
    ("grammar", chain(3000)),
    ("grammar", chain(3000, '{0} {0} | "a"')),
    ("grammar", chain(6000, name="T{}")),
    ("grammar", chain(40, "{0} {0}", name="T{}")),
    ("grammar", growing(22)),
    ("grammar", growing(22, "a/{}")),
    ("grammar", 'start: %json {"items": ' + '{"items": ' * 9000 + "{}" + "}" * 9001),
    ("grammar", "start: %json {a"),
    ("grammar", "start: " + "a{" * 30_000 + "b" + "}" * 30_000),
    ("grammar", "%ignore /(" + "a*" * 10_000 + ')*/\nstart: "b"'),
    ("grammar", "start: " + "a " * 40_000 + '\na: "x" |'),
    ("regex", "[^" + "".join(map(chr, range(0x10000, 0x20000, 2))) + "]"),
]
BAD_COUNTS: list[tuple[str, Any]] = [
    ("schema", doubling(14)),
    ("schema", {"type": "object", "properties": {str(n): {} for n in range(5000)}}),
    ("schema", {"type": "string", "maxLength": 10**9}),
    ("schema", {"type": "array", "minItems": 10**12}),
]
"""Counts that only methods which decode from left to right can keep."""


def check_refused(name: str, param: str, **options: Any) -> None:
    """Assert that a request is refused before it reaches the engine."""
    model = llm(name)
    with refuses(param):
        model.submit(QUESTION, **options)
    assert not model.driver.inbox


@pytest.mark.parametrize(("param", "value"), BAD, ids=range(len(BAD)))
def test_bad_constraint_is_refused(param: str, value: Any) -> None:
    check_refused("tiny-ar", param, **{param.partition("[")[0]: value})


@pytest.mark.parametrize(("param", "value"), BAD_COUNTS, ids=range(len(BAD_COUNTS)))
def test_too_large_schema_of_a_canvas_is_refused(param: str, value: Any) -> None:
    check_refused("tiny-dream", param, **{param: value}, method=FastDLLM())


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("choices", {"choices": ["a"], "regex": "a"}),
        ("stop", {"regex": "a", "stop": "b"}),
        ("ignore_eos", {"regex": "a", "ignore_eos": True}),
        ("min_tokens", {"choices": ["a"], "min_tokens": 3}),
        ("stop_ids", {"regex": "a", "stop_ids": [65]}),
    ],
)
def test_options_that_break_a_constraint_are_refused(param: str, options: Any) -> None:
    check_refused("tiny-ar", param, **options)


def test_a_grammar_requires_left_to_right_decoding() -> None:
    check_refused("tiny-dream", "grammar", grammar='start: "a"', method=D2F())


def test_a_constraint_requires_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llm("tiny-ar")), "eos", frozenset())
    check_refused("tiny-ar", "regex", regex="a")


@pytest.mark.parametrize("name", ["tiny-ar", "tiny-dream"])
def test_too_long_answers_are_refused(name: str) -> None:
    # The expressions are compiled: the shortest text has twelve tokens.
    regex = r"x{12}\u2603*|[xy]{30,}"
    check_refused(name, "regex", regex=regex, max_tokens=11)
    (output,) = llm(name).generate(QUESTION, regex=regex, max_tokens=12)
    assert output.text == "x" * 12 and output.finish_reason == "stop"


def test_far_too_long_rules_are_not_compiled() -> None:
    long, model = r"[\s\S]{4000}", llm("tiny-dream")
    compiled = [*model.compiler.compiled_rules]
    check_refused("tiny-dream", "regex", regex=long, max_tokens=16)
    schema = {"type": "string", "minLength": 4000}
    check_refused("tiny-dream", "schema", schema=schema, max_tokens=16)
    with refuses("holes[0]"):
        model.fill(["Say ", Hole(16, regex=long)])
    assert [*model.compiler.compiled_rules] == compiled
    check_refused("tiny-dream", "regex", regex="[0-9]{144}", max_tokens=16)
    assert [*model.compiler.compiled_rules] != compiled  # this one may fit


def words() -> Tokenizer:
    known = {word: number for number, word in enumerate(["</s>", "a", "b", "c", "d", "e"])}
    return Tokenizer(Backend(WordLevel(known, unk_token="a")), {})


def pieces() -> Tokenizer:
    names = ["</s>", "<0x0A>", "<0xC3>", "\u2581a", "\u00e9", "b"]
    known = {name: number for number, name in enumerate(names)}
    tokenizer = Backend(BPE(known, [], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("\u2581", " "), ByteFallback(), Fuse()])
    return Tokenizer(tokenizer, {"eos_token": "</s>"})


SLOTS: dict[str, Any] = {
    "sequential": True,
    "begin": 0,
    "limit": 8,
    "size": 6,
    "ends": frozenset({0}),
}


@pytest.mark.parametrize(
    ("tokenizer", "regex", "changes"),
    [
        (words(), "a", {}),
        (None, "a", {}),
        (pieces(), "b", {"ends": frozenset()}),
        (pieces(), "xyz", {}),
    ],
    ids=["no bytes", "no tokenizer", "no end", "no tokens"],
)
def test_what_a_vocabulary_cannot_spell_is_refused(
    tokenizer: Tokenizer | None, regex: str, changes: dict[str, Any]
) -> None:
    with refuses("regex"):
        Compiler(tokenizer, None).build_constraint(("regex", regex), **{**SLOTS, **changes})


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Compiler(pieces(), None)
    one.build_constraint(("regex", "b"), **SLOTS)
    first = next(iter(one.compiled_rules.values()))
    one.build_constraint(("regex", "b"), **SLOTS)
    assert list(one.compiled_rules.values()) == [first]
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", first.cached_bytes + 50)
    for number in range(2, 6):
        one.build_constraint(("regex", f"b{{{number}}}"), **SLOTS)
        assert len(one.compiled_rules) == 1
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 150_000)
    for number in range(1, 7):  # whose texts alone take 0.2 MB
        one.build_constraint(("regex", f"(?#{'x' * 9000})b{{{number}}}"), **SLOTS)
    assert 1 < len(one.compiled_rules) < 6


@pytest.mark.parametrize("grammar", ['start: "b"', chain(2500), "start: " + '"b" | ' * 500 + '"b"'])
def test_grammars_share_one_vocabulary(grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A grammar's memory is estimated by the time that it compiles: a slow machine would keep one.
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 2**40)
    one, read = Compiler(pieces(), None), []
    for ends in (frozenset({0}), frozenset({0, 1})):
        slots = {**SLOTS, "ends": ends}
        constraint: Any = one.build_constraint(("grammar", grammar), **slots)
        read.append(one.grammar_vocabularies[6])
        for tokens, allowed in ((), {5}), ((5,), ends):
            logits = torch.zeros(1, 6)
            constraint(logits, [len(tokens)], tokens)
            assert {*logits[0].eq(0).nonzero().flatten().tolist()} == allowed
    assert read[0] is read[1] and len(one.compiled_rules) == 2


def test_automata_of_patterns_are_kept_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DfaCache()
    build = cache.keep_dfas(Dfa.from_pattern)
    monkeypatch.setattr(dfa, "MAX_KEPT_BYTES", 300_000)
    assert build("a{50}") is build("a{50}")
    for number in range(1, 60):
        build(f"a{{{number}}}")
    sizes = [found.table.nbytes for found, _ in cache.entries.values()]
    assert len(sizes) > 1 and cache.num_bytes >= sum(sizes) and cache.num_bytes <= 300_000


def test_the_length_of_a_prompt_comes_before_a_constraint() -> None:
    model = llm("tiny-ar")
    compiled = [*model.compiler.compiled_rules]
    check_refused("tiny-ar", "max_tokens", regex="(a|b)*a(a|b){25}", max_tokens=10**6)
    assert [*model.compiler.compiled_rules] == compiled


@pytest.mark.parametrize("strict", [False, True])
def test_dear_tools_together_have_one_bound_of_work(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    monkeypatch.setattr(tools, "MAX_PART_STEPS", 20_000)
    dear = [{"type": "string", "pattern": f"^[ab]*a[ab]{{5}}{number}$"} for number in range(60)]
    names = [f"f{place}" for place in range(60)]
    parts = [{"type": "object", "properties": {"a": each}} for each in dear]
    functions = [*zip(names, range(60), parts, strict=True)]
    rule = {
        "functions": functions,
        "free": False,
        "single": True,
        "strict": names if strict else (),
    }
    if strict:
        with pytest.raises(OptionError) as refused:
            tools_dfa(json.dumps(rule), GENERIC_FORMAT)
        assert refused.value.param.endswith(".function.parameters")
        return
    whole = tools_dfa(json.dumps(rule), GENERIC_FORMAT)
    call = '{"name": "%s", "arguments": {"a": "x'
    assert whole.walk((call % names[0]).encode()) < 0 <= whole.walk((call % names[-1]).encode())


def test_without_wait_a_rule_is_not_compiled() -> None:
    one = Compiler(pieces(), None)
    for regex in ("b", "["):
        with pytest.raises(NotCompiledError):
            one.build_constraint(("regex", regex), wait=False, **SLOTS)
    assert not one.compiled_rules
    first = one.build_constraint(("regex", "b"), **SLOTS)
    with one.compile_lock:  # a cached constraint does not wait for the lock
        assert one.build_constraint(("regex", "b"), wait=False, **SLOTS) is not first


@dataclass(frozen=True, kw_only=True)
class Careless(Method):
    """Fills several holes of one forward without a joint read."""

    target_kinds = (Kind.DIFFUSION,)

    def decode(self, request: Request) -> Decoding:
        begin = len(request)
        out = yield Forward(
            ids=request.ids + [request.target.mask_id] * request.max_tokens,
            start=0,
            pattern=FULL,
            predict=range(begin, request.limit),
            read=request.sample(),
        )
        request.commit(out.tokens)


def test_violating_a_constraint_fails_the_request() -> None:
    with pytest.raises(DecodingError, match="constraint"):
        llm("tiny-dream").generate(
            "Go", regex="(ab|ba){3}|(cd|dc){3}", max_tokens=8, method=Careless()
        )
