"""Compilation of constraints, with a cache."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from outpace.constraint.automaton import HOLE_CLASS, UNREACHABLE, TokenAutomaton
from outpace.constraint.calls import CallFormat
from outpace.constraint.dfa import Dfa, StateFlags
from outpace.constraint.grammar import (
    JSON_SPACING,
    CompiledGrammar,
    GrammarConstraint,
    GrammarVocabulary,
)
from outpace.constraint.loosened import LISTS, MAPPINGS
from outpace.constraint.pattern import MAX_PATTERN_LENGTH, TextRoom, TooLargeError, UnsupportedError
from outpace.constraint.regular import RegularConstraint, TokenLanguage
from outpace.constraint.schema import LARGE_COUNT, check_schema_limits, schema_dfa
from outpace.constraint.thoughts import ThoughtFormat, add_thoughts, free_text_dfa
from outpace.constraint.tools import tools_dfas
from outpace.constraint.vocabulary import Vocabulary, token_bytes
from outpace.decoding import Constraint, Request
from outpace.errors import OptionError
from outpace.tokenizer import Tokenizer

ConstraintRule = tuple[str, str]
"""Option name (`schema`, `regex`, `choices`, `grammar`, `tools`) and its text, which is JSON for
`schema`, `choices` and `tools`. With `FREE_RULE`, only the length of thoughts is limited."""

FREE_RULE: ConstraintRule = ("max_reasoning_tokens", "")
"""Rule of an answer that is any text."""


def constraint_rule(
    *, schema: Any = None, regex: Any = None, choices: Any = None, grammar: Any = None
) -> ConstraintRule | None:
    """Return the constraint of a request on its text, which has at most one."""
    values = {"schema": schema, "regex": regex, "choices": choices, "grammar": grammar}
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise OptionError(
            given[1], values[given[1]], f"cannot be combined with {given[0]}: give one"
        )
    if schema is not None:
        return "schema", schema_text(schema)
    if choices is not None:
        return "choices", json.dumps(check_choices(choices))
    for name, value in (("regex", regex), ("grammar", grammar)):
        if value is not None and not isinstance(value, str):
            raise OptionError(name, value, "must be a string")
    return None if not given else (given[0], values[given[0]])


def schema_text(schema: Any) -> str:
    model = getattr(schema, "model_json_schema", None)
    found = model() if isinstance(schema, type) and callable(model) else schema
    if not isinstance(found, dict):
        raise OptionError("schema", schema, "must be a JSON schema (a dict) or a pydantic model")
    try:
        return json.dumps(found)
    except RecursionError as error:
        raise OptionError("schema", schema, "is too large: it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise OptionError("schema", schema, f"is not JSON: {error}") from error


def check_choices(choices: Any) -> Sequence[str]:
    if not isinstance(choices, list | tuple) or not choices:
        raise OptionError("choices", choices, "must be a non-empty list of strings")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str):
            raise OptionError(f"choices[{number}]", choice, "must be a string")
    return list(choices)


MAX_HOLE_STEPS = 50_000_000
"""Maximum pairs of states visited for all places of a hole, plus a cost per place; takes at most
about a second."""


class HoleAutomaton(TokenAutomaton):
    """An automaton whose strings fill all places, without an end-of-sequence."""

    is_padded = False

    def __init__(self, dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        super().__init__(dfa, vocabulary, ends)
        self.rooms: list[StateFlags] = [self.accepts]

    def add_padding(self) -> None:
        """Let only end-of-sequence, or nothing, follow whole strings."""
        self.accepts[self.end] = self.is_padded
        self.table[self.accepts, -1] = self.end if self.is_padded else -1

    @property
    def max_distance(self) -> int:
        return UNREACHABLE

    def can_finish(self, room: int, thoughts: int | None = None) -> StateFlags:
        """Return the states `[S]` from which exactly `room` places can be filled; no thoughts."""
        if room < 0:
            return np.zeros_like(self.accepts)
        if room >= len(self.rooms):
            if room * (self.pairs.shape[1] + 500) > MAX_HOLE_STEPS:
                raise TooLargeError(f"it is too large for {room} tokens: shorten one of them")
            rooms = list(self.rooms)  # a copy, because other threads may extend it too
            while len(rooms) <= room:
                rooms.append(self.predecessors(rooms[-1], HOLE_CLASS))
            self.rooms = rooms
        return self.rooms[room]


class PaddedHoleAutomaton(HoleAutomaton):
    """A hole automaton in which end-of-sequence fills the remaining places."""

    is_padded = True


INNER_SUBSCHEMAS = ("items", "additionalProperties")
COUNT_KEYWORDS = ("type", "$ref", "maxLength", "maxItems")
"""Keywords that matter for upper counts, by what they have."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedSchema:
    """A compiled schema: its automaton without large counts, and its counts."""

    language: TokenLanguage
    counts: CompiledGrammar

    @property
    def cached_bytes(self) -> int:
        return self.language.cached_bytes + self.counts.cached_bytes

    @property
    def min_tokens(self) -> int:
        """Number of tokens of the shortest answer; upper counts do not change it."""
        return self.language.min_tokens

    def build_constraint(
        self, *, begin: int, limit: int, mask_id: int, both: bool
    ) -> CountedConstraint:
        counts = self.counts
        return CountedConstraint(
            grammar=counts,
            matcher=counts.matcher.deep_copy(),
            begin=begin,
            mask_id=mask_id,
            regular=self.language.build_constraint(
                begin=begin, limit=limit, mask_id=mask_id, both=False
            ),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class CountedConstraint(GrammarConstraint):
    """Constrain one answer to an automaton and to counts, for left-to-right methods."""

    regular: RegularConstraint

    def ban_tokens(self, row: Tensor, front: Sequence[int]) -> bool:
        """Ban tokens that cannot follow; return False if no answer begins like this."""
        if not GrammarConstraint.ban_tokens(self, row, front):
            return False
        self.regular(row[None], [self.begin + len(front)], [*[-1] * self.begin, *front])
        return True

    def check(self, request: Request) -> None:
        GrammarConstraint.check(self, request)
        self.regular.check(request)


def count_schema(schema: Any) -> Any:
    """Return the part of a schema with upper counts, which accepts all that the schema accepts."""
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, rule in schema.items():
        if name in MAPPINGS and isinstance(rule, dict):
            found[name] = {key: count_schema(part) for key, part in rule.items()}
        elif name in LISTS and isinstance(rule, list):
            found[name] = [count_schema(part) for part in rule]
        elif name in INNER_SUBSCHEMAS:
            found[name] = count_schema(rule)
        elif name in COUNT_KEYWORDS:
            found[name] = rule
    return found


def has_large_counts(schema: Any) -> bool:
    """Return whether a part of a schema has an upper count that its automaton may omit."""
    if isinstance(schema, list):
        return any(map(has_large_counts, schema))
    return isinstance(schema, dict) and any(
        has_large_counts(rule)
        if not isinstance(rule, int | float)
        else name in ("maxLength", "maxItems") and rule > LARGE_COUNT
        for name, rule in schema.items()
    )


class RuleKey(NamedTuple):
    """What a compiled rule depends on."""

    rule: ConstraintRule
    sequential: bool
    size: int
    ends: frozenset[int]
    thoughts: ThoughtFormat | None = None
    calls: CallFormat | None = None


HOLE_AUTOMATA = {"hole": HoleAutomaton, "padded hole": PaddedHoleAutomaton}
"""Automata of rules for a hole instead of an answer."""

MAX_CACHED_BYTES = 32 * 2**20
"""Maximum memory of all cached rules; one that is larger is the only one."""


CompiledRule = TokenLanguage | CompiledGrammar | CountedSchema
"""A compiled rule, from which each request creates its constraint."""


def cached_size(key: RuleKey, rule: CompiledRule) -> int:
    return rule.cached_bytes + 4 * len(key.rule[1])


class NotCompiledError(Exception):
    """A constraint that has not been compiled, or a model not loaded, yet; retry with `wait`."""


class Compiler:
    """Compile constraints over the tokens of one tokenizer, and cache the most recent ones."""

    def __init__(self, tokenizer: Tokenizer | None, mask_id: int | None) -> None:
        self.tokenizer = tokenizer
        self.mask_id = mask_id
        self.lock, self.compile_lock = Lock(), Lock()
        self.compiled_rules: OrderedDict[RuleKey, CompiledRule] = OrderedDict()
        self.vocabularies: dict[tuple[int, frozenset[int]], Vocabulary] = {}
        self.grammar_vocabularies: dict[int, GrammarVocabulary] = {}

    def build_constraint(
        self,
        rule: ConstraintRule,
        *,
        sequential: bool,
        begin: int,
        limit: int,
        size: int,
        ends: frozenset[int],
        mask_id: int | None = None,
        wait: bool = True,
        thoughts: ThoughtFormat | None = None,
        max_thoughts: int | None = None,
        calls: CallFormat | None = None,
    ) -> Constraint:
        """Create the constraint of one answer.

        Args:
            rule: option name and text.
            sequential: whether the method commits from left to right.
            begin: first slot of the answer.
            limit: end of its slots.
            size: number of tokens of the vocabulary.
            ends: tokens that end an answer.
            mask_id: mask token, if the model that receives masks is not that of the compiler.
            wait: whether to wait for the compilation.
            thoughts: format of thoughts before the answer, or None if there are none.
            max_thoughts: maximum number of tokens before the text that ends thoughts, or None.
            calls: format of calls of tools, for a rule of `tools`.
        """
        name, _ = rule
        key = RuleKey(rule, sequential, size, ends, thoughts, calls)
        if not wait and not self.is_compiled(key):
            raise NotCompiledError
        read = self.compile_rule(key, limit - begin)
        if read.min_tokens > limit - begin:
            raise OptionError(
                name, rule[1], f"needs {read.min_tokens} tokens, but max_tokens={limit - begin}"
            )
        if mask_id is None:
            mask_id = -1 if self.mask_id is None else self.mask_id
        slots: dict[str, Any] = {"begin": begin, "limit": limit, "mask_id": mask_id}
        if thoughts is not None:
            slots["thoughts"] = max_thoughts  # only an automaton has thoughts
        return read.build_constraint(**slots, both=not sequential)

    def compile_rule(self, key: RuleKey, room: int) -> CompiledRule:
        """Return a compiled rule from the cache, or compile it under a lock."""
        # It may be rejected early if it clearly cannot be satisfied in `room` tokens.
        if (found := self.cached_rule(key)) is not None:
            return found
        with self.compile_lock:
            try:
                found = self.cached_rule(key) or self.compile_uncached(key, room)
            except ValueError as error:
                rule = key.rule
                if rule[0] in HOLE_AUTOMATA or isinstance(error, OptionError):
                    raise  # `InfillConstraint` adds the name of the hole
                raise OptionError(*rule, str(error)) from error
            with self.lock:
                self.compiled_rules[key] = found
                sizes = sum(cached_size(*each) for each in self.compiled_rules.items())
                while sizes > MAX_CACHED_BYTES and len(self.compiled_rules) > 1:
                    sizes -= cached_size(*self.compiled_rules.popitem(last=False))
        return found

    def is_compiled(self, key: RuleKey) -> bool:
        return key in self.compiled_rules

    def cached_rule(self, key: RuleKey) -> CompiledRule | None:
        with self.lock:
            if key in self.compiled_rules:
                self.compiled_rules.move_to_end(key)
            return self.compiled_rules.get(key)

    def compile_uncached(self, key: RuleKey, room: int) -> CompiledRule:
        if not key.ends:
            raise ValueError("a constraint requires an end-of-sequence token")
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer, so the text of its tokens is unknown")
        name, source = key.rule
        if len(source) > MAX_PATTERN_LENGTH:
            raise TooLargeError(
                f"it is too large: {len(source)} characters, but at most "
                f"{MAX_PATTERN_LENGTH} are allowed"
            )
        if name == "grammar":
            if not key.sequential:
                raise UnsupportedError(f"a grammar is not supported {ANY_ORDER_METHODS}")
            if key.thoughts is not None:
                raise UnsupportedError(NO_THOUGHTS)
            tokens = self.grammar_vocabulary(key.size)
            return CompiledGrammar.from_source(*key.rule, tokens, key.ends)
        formats = [each for each in (key.calls, key.thoughts) if each is not None]
        make = HOLE_AUTOMATA.get(name, TokenAutomaton)
        vocabulary = self.token_vocabulary(key.size, *formats)
        if name == "tools":
            return compile_tools(key, (room, vocabulary.max_token_bytes), vocabulary)
        try:
            dfa = build_rule_dfa(name, source, (room, vocabulary.max_token_bytes))
            if key.thoughts is not None:
                dfa = add_thoughts(dfa, key.thoughts)
            return build_language(make, dfa, vocabulary, key.ends)
        except TooLargeError as error:
            # States multiply with each upper count; llguidance counts in place of states, but from
            # left to right only.
            if name != "schema" or not key.sequential or key.thoughts is not None:
                raise
            return self.compile_counted(source, key.size, key.ends, error)

    def compile_counted(
        self, source: str, size: int, ends: frozenset[int], why: TooLargeError
    ) -> CountedSchema:
        """Compile a schema whose upper counts are too large for an automaton.

        Raises `why` again if its other parts are too large as well.
        """
        assert self.tokenizer is not None
        schema = json.loads(source)
        if not has_large_counts(schema):
            raise why
        try:
            rest = build_language(
                TokenAutomaton, schema_dfa(schema, loose=True), self.token_vocabulary(size), ends
            )
        except (TooLargeError, RecursionError):
            raise why from None
        counts = CompiledGrammar.from_source(
            "schema",
            json.dumps(count_schema(schema)),
            self.grammar_vocabulary(size),
            ends,
            **JSON_SPACING,
            coerce_one_of=True,
        )
        return CountedSchema(rest, counts)

    def grammar_vocabulary(self, size: int) -> GrammarVocabulary:
        assert self.tokenizer is not None
        if size not in self.grammar_vocabularies:
            eos = self.tokenizer.eos_token_id
            if eos is None or eos >= size:  # one that is never text, because `ends` may change
                texts = token_bytes(self.tokenizer, size)
                eos = next((token for token, text in enumerate(texts) if text is None), 0)
            self.grammar_vocabularies[size] = GrammarVocabulary.from_tokenizer(
                self.tokenizer, size, eos
            )
        return self.grammar_vocabularies[size]

    def token_vocabulary(self, size: int, *formats: CallFormat | ThoughtFormat) -> Vocabulary:
        """Return the bytes of the first `size` tokens."""
        # The mask token has none. Of the special tokens, only those of the formats have some.
        assert self.tokenizer is not None
        shown: dict[int, str] = {}
        for form in formats:
            shown |= form.special_tokens(self.tokenizer)
        key = size, frozenset(shown)
        if key not in self.vocabularies:
            texts = token_bytes(self.tokenizer, size)
            for token, text in shown.items():
                texts[token] = text.encode()
            if self.mask_id is not None and self.mask_id < size:
                texts[self.mask_id] = None
            self.vocabularies[key] = Vocabulary(texts)
        return self.vocabularies[key]


ANY_ORDER_METHODS = (
    "by methods that fill holes in any order; use a method that commits from left to right"
)

NO_THOUGHTS = (
    "a grammar cannot follow thoughts; turn them off by a variable of the chat template, such as "
    "enable_thinking=false"
)


def build_language(
    make: type[TokenAutomaton], dfa: Dfa, vocabulary: Vocabulary, ends: frozenset[int]
) -> TokenLanguage:
    automaton = make(dfa, vocabulary, ends)
    if automaton.min_tokens == UNREACHABLE:
        raise ValueError("no text of the model's tokens matches it")
    return TokenLanguage(automaton)


def build_rule_dfa(name: str, source: str, room: TextRoom) -> Dfa:
    match name:
        case "regex" | "hole" | "padded hole":
            return Dfa.from_pattern(source, room=room)
        case "choices":
            return Dfa.from_texts(json.loads(source))
        case "max_reasoning_tokens":
            return free_text_dfa()
    try:
        schema = json.loads(source)
        check_schema_limits(schema)
        return schema_dfa(schema, room)
    except RecursionError as error:
        raise TooLargeError("it is too large: it is nested too deeply") from error


def compile_tools(key: RuleKey, room: TextRoom, vocabulary: Vocabulary) -> TokenLanguage:
    """Compile tools, of which the largest have any object if the table of tokens is too large."""
    for dfa in build_tools_dfas(key.rule[1], key.calls, room):
        if key.thoughts is not None:
            dfa = add_thoughts(dfa, key.thoughts)
        try:
            return build_language(TokenAutomaton, dfa, vocabulary, key.ends)
        except TooLargeError as error:
            why = error
    raise why


def build_tools_dfas(source: str, form: CallFormat | None, room: TextRoom) -> Iterator[Dfa]:
    """Return the automata of answers with tools, or instead of calls with a constrained text.

    Raises `OptionError` if the constraint on the text is the cause.
    """
    rule, text = json.loads(source)["text"], None
    if rule is not None:
        name, constraint = rule
        try:
            text = build_rule_dfa(name, constraint, room)
        except ValueError as error:
            raise OptionError(name, constraint, str(error)) from error
    return tools_dfas(source, form, text)
