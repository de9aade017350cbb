"""Programs of `test_native`: hostile constraints, and distinct ones, in child processes."""

import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from shutil import copy
from tempfile import mkdtemp
from typing import Any

from outpace.api.text import TextCodec
from outpace.api.tools import read_tool_use
from outpace.checkpoints.checkpoint import load_tokenizer
from outpace.checkpoints.hub import ZOO_FOLDER, resolve_checkpoint
from outpace.constraint.calls import GENERIC_FORMAT
from outpace.constraint.compiler import Compiler
from outpace.engine.memory import release_memory
from outpace.errors import OptionError
from outpace.tokenizer import Tokenizer

MAX_CPU_SECONDS = 60
"""Processor time after which the system ends a program that is still at one input."""

COUNTS = (1, 3, 28, 150, 1500, 9000)
GRAMMAR_WRAPS = ["({})", "[{}]", "a{{{}}}", "~({})", "({})*", "{} | {}", "%lark {{ start: {}\n}}"]
GRAMMAR_WRAPS += [
    '%json {{"items": {}}}',
    "({}){{1,99}}",
    "/({})/",
    "/({}){{9}}/",
    "\0{}",
    "{}\n\n",
]
LINKS = ["{}", "{0} {0}", '{} | "a"', "[{}]", "({})~1..9", '("x" {})?', "~{}", "{}+", "{}::incr(_)"]
PATTERN_WRAPS = [
    "({})",
    "({})*",
    "({}){{0,99}}",
    "[{}]",
    "{}|{}",
    "({}|a)b",
    "(?i:{})",
    "{}\\w.",
    "[^{}]",
]
SCHEMA_WRAPS: list[Any] = [
    lambda inner: {"items": inner},
    lambda inner: {"anyOf": [inner, inner]},
    lambda inner: {"allOf": [inner, {"minItems": 1}]},
    lambda inner: {"prefixItems": [inner] * 3, "maxItems": 10**9},
    lambda inner: {"properties": {"a": inner, "b": inner}, "required": ["a"]},
    lambda inner: {"patternProperties": {"a": inner}},
]
CORES = ["a", "b", '"a"', "[ab]*a[ab]{9}", "\U0001f600", "9", "é\u2028", "x{1,100000000}", "A", "r"]


def wrapped(random: Random, wraps: list[str], count: int) -> str:
    """A text in templates, up to a hundred thousand characters."""
    text = random.choice(CORES)
    for wrap in random.choices(random.sample(wraps, 2), k=count):
        if len(text) * 2 > 99_000:
            break
        text = wrap.format(text, text)
    return text


def hostile_schema(random: Random) -> Any:
    """Definitions that refer to one another, or a nested schema."""
    count, wrap = random.choice(COUNTS[:5]), random.choice(SCHEMA_WRAPS)
    if random.random() < 0.5:
        schema: Any = {"type": random.choice(["string", "array", "null"]), "maxLength": 10**7}
        for _ in range(min(count, 150)):
            schema = wrap(schema)
            if len(json.dumps(schema)) > 40_000:
                break
        return schema
    siblings: list[dict[str, Any]] = [{}, {"minItems": 0}, {"title": "x"}]
    sibling = random.choice(siblings)
    defs = {str(n): wrap({"$ref": f"#/$defs/{n + 1}", **sibling}) for n in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(count): {"type": "null"}}}


def hostile_rule(random: Random) -> tuple[str, str]:
    """A constraint that may be deep, long, recursive, malformed or dear."""
    kind, count = random.choice(["grammar", "grammar", "regex", "schema"]), random.choice(COUNTS)
    if kind == "regex":
        text = wrapped(random, PATTERN_WRAPS, count)
    elif kind == "schema" or random.random() < 0.2:
        text = json.dumps(hostile_schema(random))
        text = text if kind == "schema" else f"start: %json {text}"
    elif random.random() < 0.5:
        text = "start: " + wrapped(random, GRAMMAR_WRAPS, count)
    else:
        name, link = random.choice(["r{}", "T{}"]), random.choice(LINKS)
        names = [name.format(number) for number in range(count)]
        ends = [*names[1:], random.choice([*names, '"b"', "/b*/"])]
        lines = [f"{one}: {link.format(other)}" for one, other in zip(names, ends, strict=True)]
        text = "\n".join([f"start: {names[0]}", *lines])
    if random.random() < 0.3:
        at = random.randrange(len(text))
        text = text[:at] + random.choice(['"', "(", "\0", "\n", "%json {", "::"]) + text[at + 1 :]
    return kind, text


def distinct_rules(number: int) -> Iterator[tuple[str, str]]:
    """One constraint of each kind, different for each number."""
    yield "grammar", f'start: "a{number}" | /b{{1,{number % 90 + 2}}}/'
    yield "regex", f"(a|b{number})*[cd]{{3}}"
    yield "schema", json.dumps({"type": "string", "pattern": f"^[ab]*a[ab]{{5}}{number}"})
    if number % 5 == 0:  # these take longer
        yield "schema", json.dumps({"type": "array", "maxItems": 10**6 + number, "minItems": 2})
    tool = {"name": f"f{number}", "parameters": {"properties": {"a": {"minimum": number}}}}
    use = read_tool_use([{"type": "function", "function": tool}], "required", None)
    assert use is not None
    yield "tools", use.rule


HOSTILE_VALUES: list[Any] = [None, True, -1, 2**63, 2**40, 1e308, "", "\0", [], {}, "a" * 10**6]
HOSTILE_VALUES += [{"Regex": "(a*)*(a|aa)+$"}, {"Regex": "("}, {"String": ""}, [["a", "b", "c"]]]
PARTS: list[Any] = [
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "a*"}}]},
    {"type": "Split", "pattern": {"Regex": "(?:)"}, "behavior": "Isolated", "invert": True},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA////"},
    {"type": "Truncate", "max_length": 0, "stride": 2**40},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]},
    {"type": "Fuse"},
    {"type": "Metaspace", "replacement": "▁▁", "prepend_scheme": "always", "split": True},
]


def hostile_tokenizer(random: Random, published: str) -> str:
    """The file of a tokenizer with some values replaced, removed or nested, or its text cut."""
    root = json.loads(published)
    for _ in range(random.choice([1, 1, 2, 5])):
        owner, key = root, random.choice([*root])
        while isinstance(owner[key], dict | list) and owner[key] and random.random() < 0.7:
            owner = owner[key]
            key = (
                random.choice([*owner]) if isinstance(owner, dict) else random.randrange(len(owner))
            )
        value = random.choice([*HOSTILE_VALUES, *PARTS, owner[key]])
        if random.random() < 0.2:
            del owner[key]
            continue
        for _ in range(random.choice([0, 0, 0, 1, 100])):
            value = random.choice([{"type": "Sequence", "pretokenizers": [value]}, [value]])
        owner[key] = value
    text = json.dumps(root)
    return text[: random.randrange(len(text))] if random.random() < 0.1 else text


def load_hostile_tokenizer(random: Random, folder: Path) -> bool:
    """Load a damaged tokenizer and use it; returns whether it is refused."""
    published = (ZOO_FOLDER / "vocabulary" / "tokenizer.json").read_text("utf-8")
    (folder / "tokenizer.json").write_text(hostile_tokenizer(random, published), "utf-8")
    try:
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        codec = TextCodec("hostile", tokenizer)
        codec.decode(codec.encode_plain("Tom has 3 é \U0001f600 apples.  " + "a" * 50))
    except ValueError:
        return True
    return False


def compile_rule(one: Compiler, tokenizer: Tokenizer, rule: tuple[str, str]) -> bool:
    """Compile a constraint; returns whether it is refused."""
    slots: dict[str, Any] = {"sequential": True, "begin": 0, "limit": 400}
    slots |= {"size": len(tokenizer), "ends": frozenset({tokenizer.eos_token_id})}
    try:
        one.build_constraint(rule, **slots, calls=GENERIC_FORMAT)
    except OptionError as error:
        assert error.param == rule[0]
        return True
    return False


def main(program: str, begin: int, end: int) -> None:
    """Print a line for each hostile rule, or the MiB that distinct ones add after the first."""
    tokenizer = load_tokenizer(resolve_checkpoint("tiny-ar"))
    folder = Path(mkdtemp())
    copy(ZOO_FOLDER / "tiny-ar" / "config.json", folder)
    one, sizes = Compiler(tokenizer, None), []
    for number in range(begin, end):
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + MAX_CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        if program == "tokenizers":
            print(number, load_hostile_tokenizer(Random(number), folder), flush=True)
            continue
        if program == "hostile":
            rule = hostile_rule(Random(number))
            print(number, rule[0], compile_rule(one, tokenizer, rule), flush=True)
            continue
        assert not any(compile_rule(one, tokenizer, rule) for rule in distinct_rules(number))
        if (number - begin) % 100 == 99:
            release_memory()
            with open("/proc/self/statm") as file:
                sizes.append(int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20)
    print(*sizes)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
