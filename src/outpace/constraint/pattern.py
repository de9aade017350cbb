"""Regular expressions as nondeterministic automata (NFA) over bytes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

CodeRange = tuple[int, int]
"""First and last of a range of characters, or of bytes."""

ByteRanges = tuple[CodeRange, ...]
"""Consecutive byte ranges."""

UTF8_LAST_CHARACTERS = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
"""Last character with one, two, three and four bytes."""

SURROGATES = (0xD800, 0xDFFF)


@cache
def all_characters() -> str:
    return "".join(map(chr, range(0x110000)))


def matched_ranges(node: Any, flags: int) -> list[CodeRange]:
    """Return the encodable characters that a node of a parsed pattern matches."""
    # `re` itself matches them, so that classes, flags and Unicode have its meaning.
    if is_literal(node, flags):
        spans = [(node[1], node[1])]
    elif is_explicit_set(node, flags):
        spans = [(part, part) if kind is _constants.LITERAL else part for kind, part in node[1]]
    else:
        state = _parser.State()
        state.flags, state.str = flags, ""
        one = _parser.SubPattern(state, [node])
        runs = [(_constants.MAX_REPEAT, (1, _constants.MAXREPEAT, one))]
        found = _compiler.compile(_parser.SubPattern(state, runs), flags).finditer(all_characters())
        spans = [(run.start(), run.end() - 1) for run in found]
    return list(exclude_range(spans, SURROGATES))


def set_cost(node: Any, flags: int) -> int:
    """Return how much a set of characters counts, of `MAX_CHARACTER_SETS`."""
    # `re` compares each character with each entry of a set that has any outside the basic plane.
    if node[0] is not _constants.IN or is_explicit_set(node, flags):
        return 1
    wide = any(each > "\uffff" for each in map(last_character, node[1]))
    return 1 + (len(node[1]) // ENTRIES_PER_COST if wide else 0)


def last_character(entry: Any) -> str:
    kind, value = entry
    if kind is _constants.RANGE:
        return chr(value[1])
    return chr(value) if kind is _constants.LITERAL else "\0"


def is_literal(node: Any, flags: int) -> bool:
    """Return whether a node matches one literal character, case-sensitively."""
    return node[0] is _constants.LITERAL and not flags & _constants.SRE_FLAG_IGNORECASE


def is_explicit_set(node: Any, flags: int) -> bool:
    allowed = (_constants.LITERAL, _constants.RANGE)
    return (
        node[0] is _constants.IN
        and all(kind in allowed for kind, _ in node[1])
        and not flags & _constants.SRE_FLAG_IGNORECASE
    )


def exclude_range(spans: Iterable[CodeRange], hole: CodeRange) -> Iterator[CodeRange]:
    """Yield the parts of ranges outside another range."""
    for low, high in spans:
        if low < hole[0]:
            yield low, min(high, hole[0] - 1)
        if high > hole[1]:
            yield max(low, hole[1] + 1), high


def intersect_ranges(one: Iterable[CodeRange], other: Iterable[CodeRange]) -> list[CodeRange]:
    """Return the characters in both sets of ranges, each in ascending order."""
    found, (ones, others) = list[CodeRange](), (iter(one), iter(other))
    left, right = next(ones, None), next(others, None)
    while left is not None and right is not None:
        low, high = max(left[0], right[0]), min(left[1], right[1])
        if low <= high:
            found.append((low, high))
        if left[1] < right[1]:
            left = next(ones, None)
        else:
            right = next(others, None)
    return found


def utf8_ranges(low: int, high: int) -> Iterator[ByteRanges]:
    """Yield the characters `low` to `high` as sequences of byte ranges."""
    for last in UTF8_LAST_CHARACTERS:
        if low <= last < high:
            yield from utf8_ranges(low, last)
            low = last + 1
    for places in range(len(chr(high).encode()) - 1, 0, -1):
        each = 64**places  # characters that share all bytes except these last ones
        if low // each != high // each:
            if low % each:
                edge = low - low % each + each
                yield from utf8_ranges(low, edge - 1)
                yield from utf8_ranges(edge, high)
                return
            if high % each != each - 1:
                edge = high - high % each
                yield from utf8_ranges(low, edge - 1)
                yield from utf8_ranges(edge, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


MAX_PATTERN_LENGTH = 100_000
"""Maximum characters of a constraint."""

MAX_NFA_STATES = 60_000
"""Maximum states of an NFA."""

MAX_CHARACTER_SETS = 50
"""Maximum different sets of characters; each is matched against all characters."""

ENTRIES_PER_COST = 20
"""Entries of a slow set that count as one more set."""

UNSUPPORTED_NODES = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "ATOMIC_GROUP": "an atomic group",
    "AT_BOUNDARY": r"the word boundary \b",
    "AT_NON_BOUNDARY": r"\B",
    "AT_BEGINNING": "^ in the middle",
    "AT_BEGINNING_STRING": r"\A in the middle",
    "AT_END": "$ in the middle",
    "AT_END_STRING": r"\Z in the middle",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a condition on a group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}
"""Constructs that no finite automaton can follow, or that are rare."""

START_ANCHORS = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
END_ANCHORS = (_constants.AT_END, _constants.AT_END_STRING)


class UnsupportedError(ValueError):
    """A construct of an expression or schema that an automaton cannot follow."""


class TooLargeError(ValueError):
    """A constraint that takes too much memory or time."""


TextRoom = tuple[int, int] | None
"""Maximum tokens of a string, and bytes of the longest token; None if unlimited."""


@dataclass(slots=True)
class Nfa:
    """A nondeterministic automaton over bytes; strings begin in state 0."""

    edges: list[list[tuple[CodeRange, int]]] = field(default_factory=lambda: [[]])
    """Byte ranges and target states of each state."""
    epsilon_edges: list[list[int]] = field(default_factory=lambda: [[]])
    """Target states of each state without a byte."""
    end: int = 0

    def add_state(self) -> int:
        if len(self.edges) == MAX_NFA_STATES:
            raise TooLargeError(
                f"it is too large: more than {MAX_NFA_STATES} states; shorten its repeats"
            )
        self.edges.append([])
        self.epsilon_edges.append([])
        return len(self.edges) - 1


def pattern_nfa(pattern: str, *, room: TextRoom = None) -> Nfa:
    """Return the NFA of what `re.fullmatch` of a pattern matches."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise TooLargeError(
            f"it is too large: {len(pattern)} characters, but at most "
            f"{MAX_PATTERN_LENGTH} are allowed"
        )
    try:
        tree = parse_pattern(pattern)
        check_room(tree.getwidth()[0], room)
        weaver = NfaBuilder(tree.state.flags)
        weaver.nfa.end = weaver.add_sequence(tree, 0, first=True, last=True)
    except (re.error, OverflowError) as error:
        raise ValueError(f"it is malformed: {error}") from error
    except RecursionError as error:
        raise TooLargeError("it is too large: its groups are nested too deeply") from error
    return weaver.nfa


def check_room(least: int, room: TextRoom) -> None:
    """Raise `ValueError` if a string of `least` characters cannot fit."""
    if room is not None and least > room[0] * room[1]:
        raise ValueError(
            f"its shortest text has {least} characters, but there is room for {room[0]} tokens "
            f"of {room[1]} bytes at most"
        )


def parse_pattern(pattern: str) -> Any:
    """Return the syntax tree of a pattern from `re`."""
    # A FutureWarning about sets is suppressed, because the caller cannot act on it.
    with warnings.catch_warnings():
        # Only this warning: the filter also affects other threads.
        warnings.filterwarnings("ignore", "Possible (nested )?set", FutureWarning)
        return _parser.parse(pattern)


@dataclass(slots=True)
class NfaBuilder:
    """Turns a parsed pattern into an NFA; `first` and `last` allow anchors at either edge."""

    flags: int
    nfa: Nfa = field(default_factory=Nfa)
    encoded_nodes: dict[str, list[ByteRanges]] = field(default_factory=dict)
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    num_sets: int = 0

    def add_sequence(self, nodes: Any, at: int, *, first: bool, last: bool) -> int:
        """Add consecutive nodes after state `at`; return the state that they lead to."""
        count = len(nodes)
        for place, node in enumerate(nodes):
            at = self.add_node(
                node, at, first=first and place == 0, last=last and place == count - 1
            )
        return at

    def add_node(self, node: Any, at: int, *, first: bool, last: bool) -> int:
        """Add one node after state `at`; return the state that it leads to."""
        kind, value = node
        match str(kind):
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return self.add_characters(node, at)
            case "BRANCH":
                return self.add_branch(value[1], at, first=first, last=last)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self.add_repeat(least, most, inner, at)
            case "SUBPATTERN":
                _, more, less, inner = value
                before = self.flags
                self.flags = _compiler._combine_flags(self.flags, more, less)
                end = self.add_sequence(inner, at, first=first, last=last)
                self.flags = before
                return end
            case "AT" if (first and value in START_ANCHORS) or (last and value in END_ANCHORS):
                return at
            case name:
                what = UNSUPPORTED_NODES.get(str(value) if name == "AT" else name, name)
                raise UnsupportedError(f"{what} is not supported")

    def add_branch(self, parts: Any, at: int, *, first: bool, last: bool) -> int:
        end = self.nfa.add_state()
        for part in parts:
            begin = self.nfa.add_state()
            self.nfa.epsilon_edges[at].append(begin)
            self.nfa.epsilon_edges[self.add_sequence(part, begin, first=first, last=last)].append(
                end
            )
        return end

    def add_repeat(self, least: int, most: int, inner: Any, at: int) -> int:
        """Add `inner` repeated `least` to `most` times."""
        for _ in range(least):
            before, at = at, self.add_sequence(inner, at, first=False, last=False)
            if at == before:
                return at  # an empty text, whatever the count
        end = self.nfa.add_state()
        if most == _constants.MAXREPEAT:
            self.nfa.epsilon_edges[at].append(loop := self.nfa.add_state())
            back = self.add_sequence(inner, loop, first=False, last=False)
            self.nfa.epsilon_edges[back].append(loop)
            self.nfa.epsilon_edges[loop].append(end)
            return end
        before = -1
        while most > least and at != before:
            self.nfa.epsilon_edges[at].append(end)
            before, at = at, self.add_sequence(inner, at, first=False, last=False)
            most -= 1
        self.nfa.epsilon_edges[at].append(end)
        return end

    def add_characters(self, node: Any, at: int) -> int:
        name = f"{self.flags} {node!r}" if node[0] is not _constants.IN else self.set_name(node)
        if name not in self.encoded_nodes:
            self.num_sets += 0 if is_literal(node, self.flags) else set_cost(node, self.flags)
            if self.num_sets > MAX_CHARACTER_SETS:
                raise TooLargeError(
                    f"it is too large: more than {MAX_CHARACTER_SETS} or large sets of characters"
                )
            self.encoded_nodes[name] = self.encode_characters(node)
        end = self.nfa.add_state()
        tails: dict[ByteRanges, int] = {(): end}
        for head, *rest in self.encoded_nodes[name]:
            self.nfa.edges[at].append((head, self.tail_state(tuple(rest), tails)))
        return end

    def set_name(self, node: Any) -> str:
        """Return a text that equal sets share, written once for each set of the tree."""
        key = self.flags, id(node[1])
        if key not in self.names:
            self.names[key] = f"{self.flags} {node!r}"
        return self.names[key]

    def encode_characters(self, node: Any) -> list[ByteRanges]:
        """Return the bytes of the characters that a node matches."""
        return [way for span in matched_ranges(node, self.flags) for way in utf8_ranges(*span)]

    def tail_state(self, spans: ByteRanges, tails: dict[ByteRanges, int]) -> int:
        if spans not in tails:
            target = self.tail_state(spans[1:], tails)
            tails[spans] = self.nfa.add_state()
            self.nfa.edges[tails[spans]].append((spans[0], target))
        return tails[spans]
