"""Constraints of requests, read once and looked up from then on."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.constraint.automaton import NEVER, Automaton
from outpace.constraint.dfa import Dfa
from outpace.constraint.grammar import Grammar
from outpace.constraint.pattern import LONGEST, TooLarge, Unsupported
from outpace.constraint.regular import Language
from outpace.constraint.schema import pattern_of
from outpace.constraint.vocabulary import Vocabulary, bytes_of
from outpace.constraint.whole import Padded, Whole
from outpace.decoding import Constraint

Rule = tuple[str, str]
"""Which option it is (`schema`, `regex`, `choices`, `grammar`), and its text; JSON of the first
and the third."""

WHOLE = {"hole": Whole, "padded hole": Padded}
"""Rules that are not of an answer but of a hole in it, and their automata."""

MEMORY = 60_000_000
"""Entries of the tables of all automata that are kept."""


class Compiler:
    """Reads constraints over the tokens of one tokenizer, each once; the latest are kept."""

    def __init__(self, tokenizer: Tokenizer | None, mask_id: int | None) -> None:
        self.tokenizer = tokenizer
        self.mask_id = mask_id
        self.lock = Lock()
        self.known: OrderedDict[object, Language | Grammar] = OrderedDict()
        self.vocabularies: dict[int, Vocabulary] = {}

    def constraint(
        self,
        rule: Rule,
        *,
        sequential: bool,
        begin: int,
        limit: int,
        size: int,
        ends: frozenset[int],
    ) -> Constraint:
        """What holds one answer to a rule, whose tokens are below `size` and which `ends` so.

        It fills slots from `begin` to `limit`. Raises `ValueError` that names the rule for one that
        is malformed, not supported, too large or fulfilled by nothing, and where the shortest
        answer is too long.
        """
        name, _ = rule
        try:
            read = self.read(rule, sequential, size, ends)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if isinstance(read, Language) and read.automaton.shortest > limit - begin:
            raise ValueError(
                f"{name}: the shortest answer takes {read.automaton.shortest} tokens, "
                f"but max_tokens={limit - begin}"
            )
        mask_id = -1 if self.mask_id is None else self.mask_id
        return read.constraint(begin=begin, limit=limit, mask_id=mask_id, both=not sequential)

    def read(
        self, rule: Rule, sequential: bool, size: int, ends: frozenset[int]
    ) -> Language | Grammar:
        """A rule for any request; what is known is not read again."""
        if not ends:
            raise ValueError("an answer needs an end-of-sequence to end with")
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer, so that nobody knows what its tokens are")
        key = rule, sequential, size, ends
        with self.lock:
            found = self.known.pop(key, None)
            if found is None:
                found = self.compiled(rule, sequential, size, ends)
            self.known[key] = found
            while sum(each.size for each in self.known.values()) > MEMORY and len(self.known) > 1:
                self.known.popitem(last=False)
        return found

    def compiled(
        self, rule: Rule, sequential: bool, size: int, ends: frozenset[int]
    ) -> Language | Grammar:
        """An automaton where there is one; else what methods that go from left to right follow."""
        assert self.tokenizer is not None
        name, source = rule
        if len(source) > LONGEST:
            raise TooLarge(
                f"it is too large: {len(source)} characters, and at most {LONGEST} are read"
            )
        if name == "grammar" and not sequential:
            raise Unsupported(f"a grammar is not supported {HERE}")
        if name == "grammar":
            return Grammar.of(name, source, self.tokenizer, size, ends)
        try:
            pattern = text_pattern(name, source)
            dfa = Dfa.of(pattern, marked=name == "schema")
            make = WHOLE.get(name, Automaton)
            automaton = make(dfa, self.vocabulary(size), ends)
            if automaton.shortest == NEVER:
                raise ValueError("no text of its tokens fulfils it")
            return Language(automaton)
        except (Unsupported, TooLarge) as error:
            if name != "schema":
                raise
            if not sequential:
                raise type(error)(f"{error} {HERE}") from error
            return Grammar.of(name, source, self.tokenizer, size, ends)

    def vocabulary(self, size: int) -> Vocabulary:
        """The first `size` tokens as bytes; the mask is none."""
        if size not in self.vocabularies:
            assert self.tokenizer is not None
            texts = bytes_of(self.tokenizer, size)
            if self.mask_id is not None and self.mask_id < size:
                texts[self.mask_id] = None
            self.vocabularies[size] = Vocabulary(texts)
        return self.vocabularies[size]


HERE = "by methods that fill holes in any order; one that commits from left to right may follow it"


def text_pattern(name: str, source: str) -> str:
    """A rule as a regular expression."""
    match name:
        case "regex" | "hole" | "padded hole":
            return source
        case "choices":
            return "|".join(map(literal, json.loads(source)))
    try:
        return pattern_of(json.loads(source))
    except RecursionError as error:
        raise TooLarge("it is too large: it is nested too deeply") from error


def literal(text: str) -> str:
    """An expression of one text."""
    return "".join(f"\\U{ord(letter):08x}" for letter in text)


def rule_of(
    *, schema: Any = None, regex: Any = None, choices: Any = None, grammar: Any = None
) -> Rule | None:
    """The rule of a request, which has one at most.

    `schema` is a JSON schema as a mapping, or a pydantic model. Raises `ValueError` for what is
    none, and for two at once.
    """
    given = {"schema": schema, "regex": regex, "choices": choices, "grammar": grammar}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{named[0]} and {named[1]} are two constraints; give one")
    if schema is not None:
        return "schema", schema_text(schema)
    if choices is not None:
        return "choices", json.dumps(checked_choices(choices))
    for name, value in (("regex", regex), ("grammar", grammar)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} must be a string, not {value!r}")
    return None if not named else (named[0], given[named[0]])


def schema_text(schema: Any) -> str:
    """A JSON schema as text."""
    model = getattr(schema, "model_json_schema", None)
    found = model() if isinstance(schema, type) and callable(model) else schema
    if not isinstance(found, dict):
        raise ValueError(
            f"schema must be a JSON schema (a dict) or a pydantic model, not {schema!r}"
        )
    try:
        return json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"schema is no JSON: {error}") from error


def checked_choices(choices: Any) -> Sequence[str]:
    """The texts of which one is the answer."""
    listed = isinstance(choices, list | tuple) and choices
    if not listed or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"choices must be a list of strings, and not empty, not {choices!r}")
    return list(choices)
