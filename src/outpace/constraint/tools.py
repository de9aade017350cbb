"""Automata of answers with tools, whose calls have the format of the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import count
from typing import Any

import numpy as np

from outpace.constraint.calls import MAX_CALL_STATES, CallFormat, calls_dfa
from outpace.constraint.dfa import (
    MAX_DETERMINIZE_STEPS,
    Dfa,
    StepBudget,
    search_table,
    subtract_dfa,
)
from outpace.constraint.keywords import SchemaReader, SubSchema
from outpace.constraint.loosened import loosen_schema
from outpace.constraint.pattern import TooLargeError, UnsupportedError
from outpace.constraint.pieces import piece_dfa
from outpace.constraint.schema import MAX_PART_STEPS, SchemaWriter, check_schema_limits
from outpace.constraint.thoughts import free_text_dfa
from outpace.errors import OptionError

LOG = logging.getLogger("outpace.constraint")

MIN_CALL_STATES = 500
"""States below which no further functions are left open."""


@dataclass(frozen=True)
class CallBudget:
    """Limits of the work for all functions of a request, which are compiled in some seconds."""

    values_read: Iterator[int] = field(default_factory=count)
    loosened: dict[str, str] = field(default_factory=dict)
    """Why schemas were loosened, by the name of the function."""
    steps: StepBudget = field(default_factory=lambda: StepBudget(8 * MAX_DETERMINIZE_STEPS))
    part_steps: StepBudget = field(default_factory=lambda: StepBudget(MAX_PART_STEPS))
    built: dict[str, Dfa] = field(default_factory=dict)


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


def arguments_dfa(place: int, schema: Any, budget: CallBudget) -> Dfa:
    """Return the automaton of the arguments of the tool at a place; they are an object."""
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
    """Return the automaton of arguments, without keywords of their schema that it cannot hold."""
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
