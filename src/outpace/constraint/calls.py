"""Formats in which models write calls of tools, and automata of answers with calls."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import count, product
from typing import Any

import numpy as np

from outpace.constraint.dfa import (
    MAX_DETERMINIZE_STEPS,
    Dfa,
    StepBudget,
    search_table,
    subtract_dfa,
)
from outpace.constraint.keywords import SchemaReader, SubSchema, resolve_reference
from outpace.constraint.pattern import TooLargeError, UnsupportedError
from outpace.constraint.pieces import piece_dfa
from outpace.constraint.schema import MAX_PART_STEPS, SchemaWriter, check_schema_limits
from outpace.constraint.strings import search_pattern_dfa
from outpace.constraint.thoughts import free_text_dfa
from outpace.constraint.vocabulary import special_tokens_in
from outpace.errors import OptionError
from outpace.tokenizer import Tokenizer

MAX_LOOSE_COUNT = 64
"""Largest count of characters, items or properties that a loosened schema keeps."""

HELD_KEYWORDS = {
    *("type", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "items", "prefixItems"),
    *("properties", "required", "additionalProperties", "pattern", "$defs", "definitions"),
    *("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum"),
}
"""Keywords that a loosened schema keeps where their value is supported."""

HELD_REFERENCE = re.compile(r"#(/items|/(properties|\$defs|definitions)/[^/]+)*")
"""References to parts that are never moved."""

OBJECT_KEYWORDS = {"properties", "required", "additionalProperties"}

TEXTS = ("title", "description", "default", "examples", "$comment")

LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
MAPPINGS = ("properties", "$defs", "definitions")
"""Keywords whose values are lists and mappings of schemas."""


def loosen_schema(schema: Mapping[str, Any], budget: StepBudget) -> Any:
    """Return a schema of keywords that an automaton holds; each object of the old one fits it.

    Patterns are dropped where the budget does not suffice.
    """
    schema = {**schema, "nullable": False}  # so that references find their targets
    return loosen_part(schema, loosen_part(schema, schema, budget), budget)


def loosen_part(schema: Any, root: Any, budget: StepBudget) -> Any:
    """Return a looser part of a schema, with the references whose targets `root` has."""
    if not isinstance(schema, Mapping):
        return schema
    found = {name: rule for name, rule in schema.items() if is_held(name, rule, root, budget)}
    if "patternProperties" in schema:  # so names of members are unknown
        found = {name: rule for name, rule in found.items() if name not in OBJECT_KEYWORDS}
    if "enum" in found or "const" in found:
        found = {name: found[name] for name in ("enum", "const") if name in found}
    if "oneOf" in found:
        both = [{"anyOf": found.pop("oneOf")}, *found.get("allOf", ())]
        found |= both[0] if "anyOf" not in found and len(both) == 1 else {"allOf": both}
    found = map_parts(found, partial(loosen_part, root=root, budget=budget))
    return {"anyOf": [found, {"type": "null"}]} if schema.get("nullable") is True else found


def map_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with each schema in it changed."""
    found = dict(schema)
    for name, rule in schema.items():
        if name in LISTS and isinstance(rule, list):
            found[name] = [change(part) for part in rule]
        elif name in MAPPINGS and isinstance(rule, Mapping):
            found[name] = {key: change(part) for key, part in rule.items()}
        elif name in ("items", "additionalProperties"):
            found[name] = change(rule)
    return found


def drop_texts(schema: Any) -> Any:
    """Return a schema without the annotations that are long and restrict nothing."""
    if not isinstance(schema, Mapping):
        return schema
    return map_parts({n: rule for n, rule in schema.items() if n not in TEXTS}, drop_texts)


def is_held(name: str, rule: Any, root: Any, budget: StepBudget) -> bool:
    """Return whether a loosened schema keeps a keyword with this value."""
    if name not in HELD_KEYWORDS:
        return False
    if name in ("enum", "const"):
        values = rule if name == "enum" else [rule]
        return isinstance(values, list) and not any(isinstance(v, list | dict) for v in values)
    if name in LISTS:
        return isinstance(rule, list)
    if name in MAPPINGS:
        return isinstance(rule, Mapping)
    match rule:
        case bool():
            return name == "additionalProperties"
        case int() | float():
            is_count = name.startswith(("minL", "maxL", "minI", "maxI"))
            return 0 <= rule <= MAX_LOOSE_COUNT if is_count else rule == int(rule)
        case list():
            return name != "items"
        case str() if name == "$ref":
            return is_reference_held(rule, root)
        case str() if name == "pattern":
            return is_pattern_held(rule, budget)
    return True


def is_reference_held(reference: str, root: Any) -> bool:
    """Return whether a reference names a part of a schema that stays in its place."""
    try:
        resolve_reference(root, reference, "#")
    except ValueError:
        return False
    return HELD_REFERENCE.fullmatch(reference) is not None


def is_pattern_held(pattern: str, budget: StepBudget) -> bool:
    """Return whether an automaton can search for a pattern."""
    try:
        search_pattern_dfa(pattern, "#", budget)
    except ValueError:
        return False
    return True


LOG = logging.getLogger("outpace.constraint")


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes calls: `begin name middle arguments (between name middle arguments)* end`.

    The arguments are a JSON object. An answer without a call is `preface text`.

    Attributes:
        name: Name of the format.
        marker: First characters of `begin`. A text with them is a call.
        begin: Text before the name of the first function.
        middle: Text between a name and its arguments.
        between: Text between the arguments and the name of the next function; None if an answer has
            one call.
        end: Text after the last arguments.
        preface: Text that begins an answer without a call.
        leads: Whether a call can only be the beginning of an answer.
        required: Texts that a chat template of this format contains.
        foreign: Texts of chat templates whose calls are similar, but not of this format.
        variants: Formats that models of such templates write at the beginning of an answer instead.
            There, only the name of a declared function makes a text a call.
        names: Declared functions, if calls may be of a variant.
    """

    name: str = "variant"
    marker: str = ""
    begin: str
    middle: str
    between: str | None = None
    end: str
    preface: str = ""
    leads: bool = False
    required: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    variants: tuple[CallFormat, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def leading_texts(self) -> dict[str, tuple[CallFormat, str]]:
        """Texts that begin a call of a variant, each with the variant and the function."""
        pairs = product(self.variants, self.names)
        return {each.begin + name + each.middle: (each, name) for each, name in pairs}

    def write_calls(self, calls: Iterable[tuple[str, str]]) -> str:
        """Return the text of calls, each a name and its arguments as JSON."""
        texts = [f"{name}{self.middle}{arguments}" for name, arguments in calls]
        return self.begin + (self.between or self.end + self.begin).join(texts) + self.end

    def special_tokens(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Return the special tokens that are part of the format, by id."""
        texts = self.begin, self.middle, self.between or "", self.end, self.preface
        return special_tokens_in(tokenizer, *texts)


def fenced_calls(key: str) -> tuple[CallFormat, CallFormat]:
    """Return the formats of a call in a fence of `json`, in one line and in several."""
    return (
        CallFormat(begin='```json\n{"name": "', middle=f'", "{key}": ', end="}\n```"),
        CallFormat(begin='```json\n{\n  "name": "', middle=f'",\n  "{key}": ', end="\n}\n```"),
    )


def leading_call(name: str, key: str, *required: str) -> CallFormat:
    """Return a format of one call, a JSON object at the beginning of an answer."""
    return CallFormat(
        name=name,
        marker='{"name"',
        begin='{"name": "',
        middle=f'", "{key}": ',
        end="}",
        leads=True,
        required=required,
        variants=fenced_calls(key),
    )


CALL_FORMATS = (
    CallFormat(
        name="tool_call",
        marker="<tool_call>",
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        between='}\n</tool_call>\n<tool_call>\n{"name": "',
        end="}\n</tool_call>",
        required=("<tool_call>", '"name"', '"arguments"'),
        foreign=("<function=", "<arg_key>", "<tool_sep>", "<tool_calls>"),
        variants=(
            CallFormat(
                begin='{"name": "', middle='", "arguments": ', between='}\n{"name": "', end="}"
            ),
            CallFormat(  # as templates of Qwen2.5-Coder write it by mistake
                begin='{{"name": "', middle='", "arguments": ', between='}}\n{{"name": "', end="}}"
            ),
            *fenced_calls("arguments"),
        ),
    ),
    CallFormat(
        name="array",
        marker="[TOOL_CALLS]",
        begin='[TOOL_CALLS][{"name": "',
        middle='", "arguments": ',
        between='}, {"name": "',
        end="}]",
        required=("[TOOL_CALLS]",),
        foreign=("[ARGS]",),
    ),
    CallFormat(
        name="args",
        marker="[TOOL_CALLS]",
        begin="[TOOL_CALLS]",
        middle="[ARGS]",
        between="[TOOL_CALLS]",
        end="",
        required=("[TOOL_CALLS]", "[ARGS]"),
        foreign=("[CALL_ID]",),
    ),
    leading_call("object", "parameters", '{"name": function name, "parameters": dictionary'),
    CallFormat(
        name="harmony",
        marker="<|channel|>commentary",
        begin="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        end="",
        preface="<|channel|>final<|message|>",
        leads=True,
        required=("<|channel|>commentary", "functions.", "<|call|>"),
    ),
    GENERIC_FORMAT := leading_call("generic", "arguments"),
)
"""Formats of Hermes, Qwen and SmolLM3; of Mistral up to Small 3.1, and after Small 3.2; of Llama
3.1 and 3.2, and of Gemma 3 as Google's guide to function calling asks for JSON; of gpt-oss, whose
calls end with the end-of-sequence token `<|call|>`; and of all other models, whose prompt declares
tools in a text."""

TOOL_VARIABLES = ("tools", "xml_tools")
"""Variables by which chat templates receive tools, the usual one first."""


def find_call_format(templates: Any) -> CallFormat | None:
    """Return the format of calls that a tokenizer's chat template describes, or the generic one.

    Args:
        templates: A template, or templates by name; None if there are none, and so no calls.
    """
    if templates is None:
        return None
    sources = templates.values() if isinstance(templates, Mapping) else [templates]
    text = "\0".join(sources).replace('\\"', '"')
    return next(
        each
        for each in CALL_FORMATS
        if all(mark in text for mark in each.required)
        and not any(mark in text for mark in each.foreign)
    )


MAX_CALL_STATES = 30_000
"""Maximum states of the automaton of calls."""

MIN_CALL_STATES = 500
"""States below which no further functions are left open."""


@dataclass(frozen=True)
class CallBudget:
    """Limits of the work for all functions of a request, which are compiled in some seconds.

    Attributes:
        loosened: Why schemas were loosened, by the name of the function.
    """

    values_read: Iterator[int] = field(default_factory=count)
    loosened: dict[str, str] = field(default_factory=dict)
    steps: StepBudget = field(default_factory=lambda: StepBudget(8 * MAX_DETERMINIZE_STEPS))
    part_steps: StepBudget = field(default_factory=lambda: StepBudget(MAX_PART_STEPS))
    built: dict[str, Dfa] = field(default_factory=dict)


class CallBuilder:
    """Builds the automaton of calls in a format; see `CallFormat` for what they are.

    Functions with equal arguments share their states.
    """

    def __init__(self, form: CallFormat) -> None:
        self.form = form
        self.starts: dict[bytes, int] = {}
        self.rows: list[dict[int, int]] = [{}]
        self.before_name = self.add_text(0, form.begin)
        self.after_arguments = self.add_state()

    def add_state(self) -> int:
        """Add a state."""
        if len(self.rows) == MAX_CALL_STATES:
            raise TooLargeError(f"it is too large: more than {MAX_CALL_STATES} states")
        self.rows.append({})
        return len(self.rows) - 1

    def add_text(self, state: int, text: str) -> int:
        """Add a text after a state; return the state that it leads to."""
        for byte in text.encode():
            if byte not in self.rows[state]:
                self.rows[state][byte] = self.add_state()
            state = self.rows[state][byte]
        return state

    def add_function(self, name: str, arguments: Dfa) -> None:
        """Add a function."""
        text = name + self.form.middle
        state = self.add_text(self.before_name, text[:-1])
        self.rows[state][ord(text[-1])] = self.add_arguments(arguments)

    def add_arguments(self, arguments: Dfa) -> int:
        """Add arguments, after whose end the call goes on; return the state before them."""
        key = arguments.table.tobytes()
        if key in self.starts:
            return self.starts[key]
        states = [
            self.after_arguments if ends else self.add_state()
            for ends in arguments.accepts.tolist()
        ]
        self.starts[key] = states[0]
        for state, row in zip(states, arguments.table.tolist(), strict=True):
            for byte, target in enumerate(row):
                if target >= 0:
                    self.rows[state][byte] = states[target]
        return states[0]

    def build_dfa(self, *, single: bool) -> Dfa:
        """Return the automaton, without further calls after the first if `single`."""
        end = self.add_text(self.after_arguments, self.form.end)
        if self.form.between is not None and not single:
            last = self.add_text(self.after_arguments, self.form.between[:-1])
            self.rows[last][ord(self.form.between[-1])] = self.before_name
        table = np.full((len(self.rows), 256), -1, dtype=np.int32)
        for state, row in enumerate(self.rows):
            table[state, list(row)] = list(row.values())
        return Dfa(table, np.arange(len(table)) == end)


def tools_dfa(source: str, form: CallFormat | None, text: Dfa | None = None) -> Dfa:
    """Return the automaton of answers with tools, the first of `tools_dfas`."""
    return next(tools_dfas(source, form, text))


def tools_dfas(source: str, form: CallFormat | None, text: Dfa | None = None) -> Iterator[Dfa]:
    """Yield automata of answers with tools, each with more functions that have any object.

    Args:
        source: JSON with the `functions`, each a name, its place and the schema of its arguments;
            the names whose schemas are `strict`; whether the answer is `free` to be a text, and
            whether it has a `single` call. Further names in `loose` are those that make a text a
            call of a variant.
        form: Format of the calls.
        text: Automaton of the texts that an answer without a call may be; None if all may.

    Raises:
        OptionError: for an invalid or unsupported schema.
        TooLargeError: if the automaton is too large.
    """
    if form is None:
        raise ValueError("the model has no chat template, and so no format of calls")
    rule, budget, most = json.loads(source), CallBudget(), MAX_CALL_STATES
    strict = rule.get("strict", ())
    functions = {
        name: arguments_dfa(place, schema, budget)
        if name in strict
        else loose_arguments_dfa(name, place, schema, budget)
        for name, place, schema in rule["functions"]
    }
    try:
        while most >= MIN_CALL_STATES:
            opened = open_large_functions(functions, form, strict, most)
            budget.loosened.update(dict.fromkeys(opened, "too large beside other tools"))
            if opened or most == MAX_CALL_STATES:
                yield answers_dfa(rule, form, functions, text)
            most //= 2
    finally:  # of the last automaton, which is the one in use
        if budget.loosened:
            log_loosened(tuple(budget.loosened.items()))


def answers_dfa(
    rule: Mapping[str, Any], form: CallFormat, functions: Mapping[str, Dfa], text: Dfa | None
) -> Dfa:
    dfa = calls_dfa(form, functions, single=rule["single"])
    if not rule["free"]:
        return dfa
    if form.preface or text is not None:
        return add_text(text or free_text_dfa(), dfa, form)
    leading = [
        (
            calls_dfa(variant, functions, single=rule["single"]),
            [variant.begin + name + variant.middle for name in functions],
        )
        for variant in (form.variants if rule["loose"] else ())
    ]
    return add_leading_calls(add_free_text(dfa, form), leading)


def calls_dfa(form: CallFormat, functions: Mapping[str, Dfa], *, single: bool) -> Dfa:
    """Return the automaton of calls of functions, by the automata of their arguments."""
    builder = CallBuilder(form)
    for name, arguments in functions.items():
        builder.add_function(name, arguments)
    return builder.build_dfa(single=single)


def arguments_dfa(place: int, schema: Any, budget: CallBudget) -> Dfa:
    """Return the automaton of the arguments of a function, the tool at a place; they are an object.

    Raises:
        OptionError: for an invalid, unsupported, too large or unsatisfiable schema.
    """
    try:
        check_schema_limits(schema)
        if (key := json.dumps(schema)) in budget.built:
            return budget.built[key]
        if isinstance(schema, dict) and schema.get("properties") == {}:
            schema = {"additionalProperties": False, **schema}
        parts = [SubSchema(schema, "#"), SubSchema({"type": "object"}, "#")]
        reader = SchemaReader(schema, budget.values_read)
        piece = SchemaWriter(reader, budget.part_steps).write_value(parts)
        dfa = piece_dfa(piece, budget.steps)
        if not len(dfa.table):
            raise ValueError("no arguments match it")
        budget.built[key] = dfa
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        param = f"tools[{place}].function.parameters"
        raise OptionError(param, schema, str(why)) from error
    return dfa


def loose_arguments_dfa(name: str, place: int, schema: Any, budget: CallBudget) -> Dfa:
    """Return the automaton of arguments, without keywords of their schema that it cannot hold.

    Raises:
        OptionError: for an invalid or unsatisfiable schema.
    """
    try:
        return arguments_dfa(place, schema, budget)
    except OptionError as error:
        try:
            found = arguments_dfa(place, loosen_schema(schema, budget.part_steps), budget)
        except OptionError as other:
            if not isinstance(other.__cause__, UnsupportedError | TooLargeError):
                raise error from None
            found = open_arguments_dfa()
        budget.loosened[name] = str(error.__cause__)
        return found


@lru_cache(maxsize=256)
def log_loosened(reasons: tuple[tuple[str, str], ...]) -> None:
    """Log once, in one line, why the schemas of tools do not constrain their calls.

    Args:
        reasons: Names of tools, each with its reason.
    """
    groups: dict[str, list[str]] = {}
    for name, reason in reasons:
        groups.setdefault(reason, []).append(name)
    shown = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in groups.items())
    LOG.warning("without strict, schemas do not constrain calls of some tools (%s)", shown)


@cache
def open_arguments_dfa() -> Dfa:
    """Return the automaton of arguments that are any object."""
    return arguments_dfa(0, {"type": "object"}, CallBudget())


def open_large_functions(
    functions: dict[str, Dfa], form: CallFormat, strict: Collection[str], most: int
) -> list[str]:
    """Let the largest functions that are not strict have any object, until all fit together.

    Returns the names of these functions.
    """
    room = most - sum(len(name + form.middle) for name in functions)
    room -= len(form.begin + form.end + (form.between or ""))
    tables = {name: dfa.table.tobytes() for name, dfa in functions.items()}  # equal ones count once
    closed = [
        name
        for name, dfa in functions.items()
        if name not in strict and dfa is not open_arguments_dfa()
    ]
    opened: list[str] = []
    for name in sorted(closed, key=lambda each: -len(functions[each].table)):
        sizes = {tables[each]: len(dfa.table) for each, dfa in functions.items()}
        if sum(sizes.values()) < room:
            break
        functions[name] = open_arguments_dfa()
        tables[name] = functions[name].table.tobytes()
        opened.append(name)
    return opened


def add_text(text: Dfa, calls: Dfa, form: CallFormat) -> Dfa:
    """Return the automaton of the texts of another one that have no marker, or calls.

    The first states have read part of the marker, and also that much of a text with its preface.

    Raises:
        ValueError: if each of the texts has a marker.
    """
    marker = form.marker.encode()
    num_open = text.num_open
    if form.preface:
        text = prepend_text(form.preface.encode(), text)
    else:
        text = subtract_dfa(text, marker_dfa(marker, leads=form.leads))
    if not len(text.table):
        raise ValueError(f"each text that it allows contains {form.marker}, which begins a call")
    size, offset = len(marker), len(marker) + len(text.table)
    shifted = np.where(text.table < 0, -1, text.table + size)
    first, accepts = np.full((size, 256), -1, dtype=np.int32), np.zeros(size, dtype=bool)
    for read, byte in enumerate(marker):
        if (state := text.walk(marker[:read])) >= 0:
            first[read], accepts[read] = shifted[state], text.accepts[state]
        first[read, byte] = read + 1 if read + 1 < size else offset + calls.walk(marker)
    rest = np.where(calls.table < 0, -1, calls.table + offset)
    table = np.concatenate([first, shifted, rest]).astype(np.int32)
    accepts = np.concatenate([accepts, text.accepts, calls.accepts])
    return Dfa(table, accepts, num_open=offset if num_open else 0)


def prepend_text(first: bytes, dfa: Dfa) -> Dfa:
    """Return the automaton of strings that begin with a text and go on as those of another one."""
    size = len(first)
    table = np.full((size, 256), -1, dtype=np.int32)
    table[np.arange(size), list(first)] = np.arange(1, size + 1)
    rest = np.where(dfa.table < 0, -1, dfa.table + size).astype(np.int32)
    accepts = np.concatenate([np.zeros(size, dtype=bool), dfa.accepts])
    return Dfa(np.concatenate([table, rest]), accepts)


def marker_dfa(marker: bytes, *, leads: bool) -> Dfa:
    """Return the automaton of texts with a marker, which begins them if it `leads`."""
    size = len(marker)
    table = np.full((size + 1, 256), size, dtype=np.int32)
    if leads:
        table[:size] = -1
        table[np.arange(size), list(marker)] = np.arange(1, size + 1)
    else:
        table[:size] = search_table(marker)
    return Dfa(table, np.arange(size + 1) == size)


def add_free_text(calls: Dfa, form: CallFormat) -> Dfa:
    """Return the automaton of texts without the marker of a call, or calls after such a text.

    The first states are those of the text. State n has read n characters of the marker; if calls
    lead, one more state has read anything else.
    """
    marker = form.marker.encode()
    size = len(marker) + form.leads
    if form.leads:
        text = np.full((size, 256), size - 1, dtype=np.int32)
        text[np.arange(len(marker)), list(marker)] = np.arange(1, size)
    else:
        text = search_table(marker)
    text[len(marker) - 1, marker[-1]] = size + calls.walk(marker)
    table = np.concatenate([text, np.where(calls.table < 0, -1, calls.table + size)])
    accepts = np.concatenate([np.ones(size, dtype=bool), calls.accepts])
    return Dfa(table.astype(np.int32), accepts, num_open=size)


def add_leading_calls(free: Dfa, leading: Sequence[tuple[Dfa, Sequence[str]]]) -> Dfa:
    """Return the automaton of free texts in which some first characters make the text a call.

    Args:
        free: The automaton of free texts.
        leading: Automata of calls, each with the beginnings that make a text one of its calls.
    """
    # A trie of the beginnings comes first; each of its nodes is also a state of the free text.
    nodes, edges = [0], [dict[int, int]()]
    blocks, outside, offset = [free.table], [], len(free.table)
    for calls, texts in leading:
        for *path, last in (text.encode() for text in texts):
            node = state = 0
            for byte in path:
                state = int(calls.table[state, byte])
                if byte not in edges[node]:
                    edges[node][byte] = len(edges)
                    nodes.append(int(free.table[nodes[node], byte]))
                    edges.append({})
                node = edges[node][byte]
            outside.append((node, last, offset + int(calls.table[state, last])))
        blocks.append(np.where(calls.table < 0, -1, calls.table + offset))
        offset += len(calls.table)
    table = np.concatenate(blocks)
    table = np.where(table < 0, -1, table + len(nodes)).astype(np.int32)
    trie = table[nodes]
    for node, own in enumerate(edges):
        trie[node, list(own)] = list(own.values())
    for node, byte, target in outside:
        trie[node, byte] = target + len(nodes)
    accepts = [free.accepts[nodes], free.accepts, *(calls.accepts for calls, _ in leading)]
    table, num_open = np.concatenate([trie, table]), len(nodes) + free.num_open
    return Dfa(table, np.concatenate(accepts), num_open=num_open)
