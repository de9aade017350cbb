"""Limits of Lark grammars, counted before native code reads them.

llguidance calls itself for each reference, bracket and `$ref`, without a limit for all of them, and
expands schemas. A stack that overflows ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder
from typing import Any, NamedTuple

from outpace.constraint.keywords import ANNOTATION_KEYWORDS, resolve_reference
from outpace.constraint.pattern import TooLargeError
from outpace.constraint.schema import check_schema_limits

MAX_GRAMMAR_SYMBOLS = 20_000
"""Maximum names, strings, expressions and brackets of a grammar; compiled in some seconds."""

MAX_GRAMMAR_REPEATS = 2_000
"""Maximum repeats in a grammar; in one expression, memory grows with their square."""

MAX_REFERENCE_DEPTH = 2_600
"""Maximum rules or terminals that refer to one another in a chain."""

MAX_TERMINAL_SYMBOLS = 100_000
"""Maximum symbols of a terminal, where those of another one count for each use."""

MAX_GRAMMAR_NESTING = 100
"""Maximum nesting of brackets."""

MAX_EXPANDED_PARTS = 50_000
"""Maximum parts of a schema in a grammar, where a definition with siblings counts for each use."""

REPEAT_SIGNS = {"expression": "*+?{", "sign": "*+?{[~"}
"""Characters of repeats and options, by the kind of the symbol."""

SYMBOL = re.compile(
    r"""
    (?P<gap> [ \t\r]+ | (?:\#|//)[^\n]*)
  | (?P<line> \n)
  | (?P<json> %(?:json|regex|llguidance)\b\s*)
  | (?P<expression> /(?:\\.|[^/\\])+/[imslux]*)
  | (?P<text> "(?:\\.|[^"\\])*"i?)
  | (?P<name> !?[_?]?[a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]*)
  | (?P<sign> ::|.)
    """,
    re.VERBOSE | re.DOTALL,
)


def check_grammar(text: str) -> None:
    """Raise `TooLargeError` for a grammar whose compilation takes too much memory or time."""
    reader, repeats = GrammarReader(), 0
    for number, (kind, symbol) in enumerate(read_symbols(text)):
        if number == MAX_GRAMMAR_SYMBOLS:
            raise TooLargeError(f"it is too large: more than {MAX_GRAMMAR_SYMBOLS} symbols")
        repeats += sum(map(symbol.count, REPEAT_SIGNS.get(kind, "")))
        reader.read_symbol(kind, symbol)
    if repeats > MAX_GRAMMAR_REPEATS:
        raise TooLargeError(
            f"it is too large: it has {repeats} repeats, but at most {MAX_GRAMMAR_REPEATS} are "
            "allowed"
        )
    reader.check_references()


def read_symbols(text: str) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each symbol; the schemas in the text are checked and left out."""
    decoder, at = JSONDecoder(), 0
    while found := SYMBOL.match(text, at):
        at, kind = found.end(), str(found.lastgroup)
        if kind == "gap":
            continue
        yield kind, found[0]
        if kind == "json":
            try:
                value, at = decoder.raw_decode(text, at)
                check_schema_limits(value)
                SchemaSizes(value).measure(value)
            except JSONDecodeError as error:
                raise ValueError(
                    f"{found[0].strip()} is followed by malformed JSON: {error}"
                ) from error
            except RecursionError as error:
                raise TooLargeError("it is too large: a schema is nested too deeply") from error


@dataclass
class GrammarReader:
    """Collects which names each definition refers to, in order."""

    # A line begins a definition if its first name is followed by a colon outside brackets.

    references: dict[str, list[str]] = field(default_factory=dict)
    """Names in each definition."""
    first: str = ""
    """First name of the line, before its colon."""
    current: str = ""
    """Name of the definition."""
    depth: int = 0
    """Nesting of brackets."""

    def read_symbol(self, kind: str, symbol: str) -> None:
        if kind == "line":
            self.first = ""
        elif kind == "name":
            self.first = self.first or symbol.lstrip("!?")
            self.references.setdefault(self.current, []).append(symbol)
        elif symbol in ("(", "[", "{"):
            self.depth += 1
            if self.depth > MAX_GRAMMAR_NESTING:
                raise TooLargeError(
                    f"it is too large: its brackets are nested more than {MAX_GRAMMAR_NESTING} deep"
                )
        elif symbol in (")", "]", "}"):
            self.depth -= 1
        elif symbol == ":" and self.first and not self.depth:
            self.current = self.first

    def check_references(self) -> None:
        """Raise `TooLargeError` for long chains of references, and terminals that grow by them."""
        # As the compilation does, this visits each definition once, from `start` on.
        sizes = dict.fromkeys(self.references, 1)
        names, visited = [""], {"start"}
        path = [iter([*self.references.get("", ()), *self.references.get("start", ())])]
        while path:
            if (name := next(path[-1], None)) is None:
                done = names.pop()
                sizes[done] = sum(sizes.get(each, 1) for each in self.references.get(done, ()))
                path.pop()
                if done.isupper() and sizes[done] > MAX_TERMINAL_SYMBOLS:
                    raise TooLargeError(
                        f"it is too large: {done} has more than {MAX_TERMINAL_SYMBOLS} symbols, "
                        "counting other terminals for each use"
                    )
            elif name in self.references and name not in visited:
                visited.add(name)
                names.append(name)
                path.append(iter(self.references[name]))
                if len(path) > MAX_REFERENCE_DEPTH:
                    raise TooLargeError(
                        "it is too large: its rules refer to one another more than "
                        f"{MAX_REFERENCE_DEPTH} deep"
                    )


class SchemaSize(NamedTuple):
    """Upper bounds of a schema after llguidance has expanded it."""

    cases: int = 1
    parts: int = 1
    """Parts of all of them."""

    def intersect(self, other: SchemaSize) -> SchemaSize:
        """Return the size of a value for which two schemas hold."""
        return SchemaSize(
            self.cases * other.cases, self.parts * other.cases + other.parts * self.cases
        )

    def add_inner(self, other: SchemaSize) -> SchemaSize:
        return SchemaSize(max(self.cases, other.cases), self.parts + other.parts)


class SchemaSizes:
    """Measures the parts of one schema."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.measured: dict[str, SchemaSize] = {}

    def measure(self, value: Any, *, expands: bool = False) -> SchemaSize:
        """Return the size of a part, where `$ref` is replaced by its target if that is needed."""
        size = SchemaSize()
        if isinstance(value, list):
            for part in value:
                size = size.add_inner(self.measure(part))
        elif isinstance(value, Mapping):
            # llguidance copies the target of a reference only beside other keywords.
            expands = expands or len(value.keys() - ANNOTATION_KEYWORDS) > 1
            for name, rule in value.items():
                if name in ("anyOf", "oneOf", "allOf") and isinstance(rule, list):
                    parts = [self.measure(part, expands=expands or len(rule) > 1) for part in rule]
                    for part in [sum_sizes(parts)] if name != "allOf" else parts:
                        size = size.intersect(part)
                elif name == "$ref" and isinstance(rule, str):
                    size = size.intersect(self.measure_target(rule) if expands else SchemaSize())
                else:
                    size = size.add_inner(self.measure(rule))
        if size.parts > MAX_EXPANDED_PARTS:
            raise TooLargeError(
                f"it is too large: a schema has more than {MAX_EXPANDED_PARTS} parts, counting a "
                "definition at each use beside other keywords"
            )
        return size

    def measure_target(self, reference: str) -> SchemaSize:
        """Return the size of the target of a reference, which is measured once."""
        if reference not in self.measured:
            # A cycle is counted once.
            self.measured[reference] = SchemaSize()  # within itself
            try:
                found = resolve_reference(self.root, reference, "#")
            except ValueError:
                found = None  # llguidance refuses it
            self.measured[reference] = self.measure(found, expands=True)
        return self.measured[reference]


def sum_sizes(parts: list[SchemaSize]) -> SchemaSize:
    """Return the size of a value for which one of several schemas holds."""
    return SchemaSize(
        max(sum(each.cases for each in parts), 1), max(sum(each.parts for each in parts), 1)
    )
