"""Constraints of requests, read once and looked up from then on."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase as Tokenizer

from outpace.constraint.automaton import NEVER, Automaton
from outpace.constraint.counted import Counted, has_large_counts
from outpace.constraint.dfa import Dfa
from outpace.constraint.grammar import Grammar
from outpace.constraint.pattern import LONGEST, Room, TooLarge, Unsupported
from outpace.constraint.regular import Language
from outpace.constraint.schema import schema_dfa
from outpace.constraint.vocabulary import Vocabulary, bytes_of
from outpace.constraint.whole import Padded, Whole
from outpace.decoding import Constraint
from outpace.errors import OptionError

Rule = tuple[str, str]
"""Which option it is (`schema`, `regex`, `choices`, `grammar`), and its text; JSON of the first
and the third."""

DIGITS = 40
"""Of the numbers in a schema."""

DEEPEST = 100
"""Lists and mappings of a schema within one another."""

WHOLE = {"hole": Whole, "padded hole": Padded}
"""Rules that are not of an answer but of a hole in it, and their automata."""

MEMORY = 60_000_000
"""Entries of the tables of all automata that are kept."""


Read = Language | Grammar | Counted
"""A rule that was read: what makes the constraint of each request."""


class Unread(Exception):
    """A constraint that was not read yet, or a model; ask again, and wait."""


class Compiler:
    """Reads constraints over the tokens of one tokenizer, each once; the latest are kept."""

    def __init__(self, tokenizer: Tokenizer | None, mask_id: int | None) -> None:
        self.tokenizer = tokenizer
        self.mask_id = mask_id
        self.lock, self.reading = Lock(), Lock()
        self.known: OrderedDict[object, Read] = OrderedDict()
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
        mask_id: int | None = None,
        wait: bool = True,
    ) -> Constraint:
        """What holds one answer to a rule, whose tokens are below `size` and which `ends` so.

        It fills slots from `begin` to `limit`; `mask_id` stands for a hole where another model than
        that of the compiler is fed holes. Raises `ValueError` that names the rule for one that
        is malformed, not supported, too large or fulfilled by nothing, and where the shortest
        answer is too long; and unless it shall `wait`, `Unread` for one that takes time to read.
        """
        name, _ = rule
        if not wait and not self.knows(rule, sequential, size, ends):
            raise Unread
        read = self.read(rule, sequential, size, ends, limit - begin)
        if read.shortest > limit - begin:
            raise OptionError(
                name,
                rule[1],
                f"{name}: the shortest answer takes {read.shortest} tokens, "
                f"but max_tokens={limit - begin}",
            )
        if mask_id is None:
            mask_id = -1 if self.mask_id is None else self.mask_id
        return read.constraint(begin=begin, limit=limit, mask_id=mask_id, both=not sequential)

    def read(
        self, rule: Rule, sequential: bool, size: int, ends: frozenset[int], room: int
    ) -> Read:
        """A rule for any request; what is known is not read again, nor does it wait for others.

        It may not be read, but refused at once, where `room` for so many tokens is plainly too
        little.
        """
        key = rule, sequential, size, ends
        if (found := self.found(key)) is not None:
            return found
        with self.reading:
            try:
                found = self.found(key) or self.compiled(rule, sequential, size, ends, room)
            except ValueError as error:
                if rule[0] in WHOLE:
                    raise  # its cloze says which hole it is
                raise OptionError(*rule, f"{rule[0]}: {error}") from error
            with self.lock:
                self.known[key] = found
                sizes = sum(each.size for each in self.known.values())
                while sizes > MEMORY and len(self.known) > 1:
                    sizes -= self.known.popitem(last=False)[1].size
        return found

    def knows(self, rule: Rule, sequential: bool, size: int, ends: frozenset[int]) -> bool:
        """Whether a rule was read already."""
        return (rule, sequential, size, ends) in self.known

    def found(self, key: object) -> Read | None:
        """What is known, which now is the latest."""
        with self.lock:
            if key in self.known:
                self.known.move_to_end(key)
            return self.known.get(key)

    def compiled(
        self, rule: Rule, sequential: bool, size: int, ends: frozenset[int], room: int
    ) -> Read:
        """An automaton where there is one; else what methods that go from left to right follow."""
        if not ends:
            raise ValueError("an answer needs an end-of-sequence to end with")
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer, so that nobody knows what its tokens are")
        name, source = rule
        if len(source) > LONGEST:
            raise TooLarge(
                f"it is too large: {len(source)} characters, and at most {LONGEST} are read"
            )
        if name == "grammar" and not sequential:
            raise Unsupported(f"a grammar is not supported {HERE}")
        if name == "grammar":
            return Grammar.of(name, source, self.tokenizer, size, ends)
        make, vocabulary = WHOLE.get(name, Automaton), self.vocabulary(size)
        try:
            return language(
                make, bytewise(name, source, (room, vocabulary.longest)), vocabulary, ends
            )
        except TooLarge as error:
            if name != "schema" or not sequential:
                raise
            return self.counted(source, size, ends, error)

    def counted(self, source: str, size: int, ends: frozenset[int], why: TooLarge) -> Counted:
        """A schema whose upper counts are too large for an automaton.

        Raises `why` again where its other parts are too large, too.
        """
        assert self.tokenizer is not None
        schema = json.loads(source)
        if not has_large_counts(schema):
            raise why
        try:
            rest = language(Automaton, schema_dfa(schema, loose=True), self.vocabulary(size), ends)
        except (TooLarge, RecursionError):
            raise why from None
        return Counted.of(rest, schema, self.tokenizer, size, ends)

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


def language(
    make: type[Automaton], dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]
) -> Language:
    """An automaton over tokens. Raises `ValueError` where no tokens are text that it accepts."""
    automaton = make(dfa, vocabulary, ends)
    if automaton.shortest == NEVER:
        raise ValueError("no text of its tokens fulfils it")
    return Language(automaton)


def bytewise(name: str, source: str, room: Room) -> Dfa:
    """A rule as an automaton over bytes."""
    match name:
        case "regex" | "hole" | "padded hole":
            return Dfa.of(source, room=room)
        case "choices":
            return Dfa.among(json.loads(source))
    try:
        schema = json.loads(source)
        check(schema)
        return schema_dfa(schema, room)
    except RecursionError as error:
        raise TooLarge("it is too large: it is nested too deeply") from error


def check(value: Any, at: str = "#", depth: int = 0) -> None:
    """Raise `ValueError` for numbers that are none or have many digits, and for what lies deep."""
    if depth > DEEPEST:
        raise ValueError(f"it is too large: it is nested more than {DEEPEST} deep")
    listed = enumerate(value) if isinstance(value, list) else ()
    for name, part in value.items() if isinstance(value, dict) else listed:
        if isinstance(part, int | float) and not abs(part) < 10**DIGITS:
            raise ValueError(f"{name} at {at} must be a number of at most {DIGITS} digits")
        check(part, f"{at}/{name}", depth + 1)


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
        message = f"{named[1]} and {named[0]} are two constraints; give one"
        raise OptionError(named[1], given[named[1]], message)
    if schema is not None:
        return "schema", schema_text(schema)
    if choices is not None:
        return "choices", json.dumps(checked_choices(choices))
    for name, value in (("regex", regex), ("grammar", grammar)):
        if value is not None and not isinstance(value, str):
            raise OptionError(name, value, f"{name} must be a string, not {value!r}")
    return None if not named else (named[0], given[named[0]])


def schema_text(schema: Any) -> str:
    """A JSON schema as text."""
    model = getattr(schema, "model_json_schema", None)
    found = model() if isinstance(schema, type) and callable(model) else schema
    if not isinstance(found, dict):
        message = f"schema must be a JSON schema (a dict) or a pydantic model, not {schema!r}"
        raise OptionError("schema", schema, message)
    try:
        return json.dumps(found)
    except RecursionError as error:
        message = "schema is too large: it is nested too deeply"
        raise OptionError("schema", schema, message) from error
    except (TypeError, ValueError) as error:
        raise OptionError("schema", schema, f"schema is no JSON: {error}") from error


def checked_choices(choices: Any) -> Sequence[str]:
    """The texts of which one is the answer."""
    if not isinstance(choices, list | tuple) or not choices:
        message = f"choices must be a list of strings, and not empty, not {choices!r}"
        raise OptionError("choices", choices, message)
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            message = f"choices[{number}] must be a string, not {choice!r}"
            raise OptionError(f"choices[{number}]", choice, message)
    return list(choices)
