"""Regular expressions as nondeterministic automata (NFA) over bytes."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from outpace.constraint.charset import Span, Way, alone, matched, utf8

LONGEST = 100_000
"""Maximum characters of a constraint."""

MOST_STATES = 60_000
"""Maximum states of an NFA."""

MOST_SETS = 50
"""Maximum different sets of characters; each is matched against all characters."""

UNSUPPORTED = {
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

BEGINNINGS = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
ENDINGS = (_constants.AT_END, _constants.AT_END_STRING)


class Unsupported(ValueError):
    """A construct of an expression or schema that an automaton cannot follow."""


class TooLarge(ValueError):
    """A constraint that takes too much memory or time."""


Room = tuple[int, int] | None
"""Maximum tokens of a text, and bytes of the longest token; None if unlimited."""


@dataclass(slots=True)
class Net:
    """A nondeterministic automaton over bytes; texts begin in state 0.

    Attributes:
        edges: byte ranges and target states of each state.
        epsilon_edges: target states of each state without a byte.
        end: accepting state.
    """

    edges: list[list[tuple[Span, int]]] = field(default_factory=lambda: [[]])
    free: list[list[int]] = field(default_factory=lambda: [[]])
    end: int = 0

    def state(self) -> int:
        """Add a state."""
        if len(self.edges) == MOST_STATES:
            raise TooLarge(f"it is too large: more than {MOST_STATES} states; shorten its repeats")
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1


def net_of(pattern: str, *, room: Room = None) -> Net:
    """Return the NFA of what `re.fullmatch` of a pattern matches.

    Raises:
        UnsupportedError: if the pattern uses an unsupported construct.
        TooLargeError: if the NFA is too large.
        ValueError: if the pattern is malformed or clearly exceeds `room`.
    """
    if len(pattern) > LONGEST:
        raise TooLarge(
            f"it is too large: {len(pattern)} characters, but at most {LONGEST} are allowed"
        )
    try:
        tree = parsed(pattern)
        check_room(tree.getwidth()[0], room)
        weaver = Weaver(tree.state.flags)
        weaver.net.end = weaver.sequence(tree, 0, first=True, last=True)
    except (re.error, OverflowError) as error:
        raise ValueError(f"it is malformed: {error}") from error
    except RecursionError as error:
        raise TooLarge("it is too large: its groups are nested too deeply") from error
    return weaver.net


def check_room(least: int, room: Room) -> None:
    """Raise `ValueError` if a text of `least` characters cannot fit."""
    if room is not None and least > room[0] * room[1]:
        raise ValueError(
            f"its shortest text has {least} characters, but there is room for {room[0]} tokens "
            f"of {room[1]} bytes at most"
        )


def parsed(pattern: str) -> Any:
    """Return the syntax tree of a pattern from `re`.

    A FutureWarning about sets is suppressed, because the caller cannot act on it.
    """
    with warnings.catch_warnings():
        # Only this warning: the filter also affects other threads.
        warnings.filterwarnings("ignore", "Possible (nested )?set", FutureWarning)
        return _parser.parse(pattern)


@dataclass(slots=True)
class Weaver:
    """Turns a parsed pattern into an NFA; `first` and `last` allow anchors at either edge."""

    flags: int
    net: Net = field(default_factory=Net)
    known: dict[str, list[Way]] = field(default_factory=dict)
    looks: int = 0

    def sequence(self, nodes: Any, at: int, *, first: bool, last: bool) -> int:
        """Add consecutive nodes after state `at`; return the state that they lead to."""
        count = len(nodes)
        for place, node in enumerate(nodes):
            at = self.node(node, at, first=first and place == 0, last=last and place == count - 1)
        return at

    def node(self, node: Any, at: int, *, first: bool, last: bool) -> int:
        """Add one node after state `at`; return the state that it leads to."""
        kind, value = node
        match str(kind):
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                return self.characters(node, at)
            case "BRANCH":
                return self.branch(value[1], at, first=first, last=last)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self.repeat(least, most, inner, at)
            case "SUBPATTERN":
                _, more, less, inner = value
                before = self.flags
                self.flags = _compiler._combine_flags(self.flags, more, less)
                end = self.sequence(inner, at, first=first, last=last)
                self.flags = before
                return end
            case "AT" if (first and value in BEGINNINGS) or (last and value in ENDINGS):
                return at
            case name:
                what = UNSUPPORTED.get(str(value) if name == "AT" else name, name)
                raise Unsupported(f"{what} is not supported")

    def branch(self, parts: Any, at: int, *, first: bool, last: bool) -> int:
        """Add alternatives."""
        end = self.net.state()
        for part in parts:
            begin = self.net.state()
            self.net.free[at].append(begin)
            self.net.free[self.sequence(part, begin, first=first, last=last)].append(end)
        return end

    def repeat(self, least: int, most: int, inner: Any, at: int) -> int:
        """Add `inner` repeated `least` to `most` times."""
        for _ in range(least):
            before, at = at, self.sequence(inner, at, first=False, last=False)
            if at == before:
                return at  # an empty text, whatever the count
        end = self.net.state()
        if most == _constants.MAXREPEAT:
            self.net.free[at].append(loop := self.net.state())
            back = self.sequence(inner, loop, first=False, last=False)
            self.net.free[back].append(loop)
            self.net.free[loop].append(end)
            return end
        before = -1
        while most > least and at != before:
            self.net.free[at].append(end)
            before, at = at, self.sequence(inner, at, first=False, last=False)
            most -= 1
        self.net.free[at].append(end)
        return end

    def characters(self, node: Any, at: int) -> int:
        """Add one character of those that a node matches."""
        name = f"{self.flags} {node!r}"
        if name not in self.known:
            self.looks += not alone(node, self.flags)
            if self.looks > MOST_SETS:
                raise TooLarge(f"it is too large: more than {MOST_SETS} sets of characters")
            self.known[name] = self.ways(node)
        end = self.net.state()
        tails: dict[Way, int] = {(): end}
        for head, *rest in self.known[name]:
            self.net.edges[at].append((head, self.tail(tuple(rest), tails)))
        return end

    def ways(self, node: Any) -> list[Way]:
        """Return the bytes of the characters that a node matches."""
        return [way for span in matched(node, self.flags) for way in utf8(*span)]

    def tail(self, spans: Way, tails: dict[Way, int]) -> int:
        """Return a state from which these bytes lead to the end; equal tails share it."""
        if spans not in tails:
            target = self.tail(spans[1:], tails)
            tails[spans] = self.net.state()
            self.net.edges[tails[spans]].append((spans[0], target))
        return tails[spans]
