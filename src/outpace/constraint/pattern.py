"""Regular expressions as nets: states, of which bytes lead from one to others."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from outpace.constraint.charset import Span, Way, alone, matched, utf8

LONGEST = 100_000
"""Characters of an expression."""

MOST_STATES = 60_000
"""States of a net."""

MOST_SETS = 50
"""Different sets of characters, each of which takes a look at all that there are."""

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
"""What no automaton of finitely many states follows, or what is rare."""

BEGINNINGS = (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING)
ENDINGS = (_constants.AT_END, _constants.AT_END_STRING)


class Unsupported(ValueError):
    """A construct of an expression or schema that an automaton cannot follow."""


class TooLarge(ValueError):
    """A constraint that takes too much memory or time."""


Room = tuple[int, int] | None
"""How many tokens a text may take, and the bytes of the longest; None where it does not matter."""


@dataclass(slots=True)
class Net:
    """A nondeterministic automaton over bytes; state 0 is where texts begin.

    Attributes:
        edges: of each state, spans of bytes and where they lead.
        free: of each state, where nothing leads.
        end: the state of whole texts.
    """

    edges: list[list[tuple[Span, int]]] = field(default_factory=lambda: [[]])
    free: list[list[int]] = field(default_factory=lambda: [[]])
    end: int = 0

    def state(self) -> int:
        """A new one."""
        if len(self.edges) == MOST_STATES:
            raise TooLarge(f"it is too large: more than {MOST_STATES} states; shorten its repeats")
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1


def net_of(pattern: str, *, room: Room = None) -> Net:
    """The net of what `re.fullmatch` of a pattern finds.

    Raises `Unsupported` that names a construct, `TooLarge`, or `ValueError` where it is malformed
    or plainly takes more `room` than there is.
    """
    if len(pattern) > LONGEST:
        raise TooLarge(
            f"it is too large: {len(pattern)} characters, and at most {LONGEST} are read"
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
    """Raise `ValueError` where so many characters have more bytes than there is room for."""
    if room is not None and least > room[0] * room[1]:
        raise ValueError(
            f"its shortest text has {least} characters, but there is room for {room[0]} tokens, "
            f"of {room[1]} bytes at most"
        )


def parsed(pattern: str) -> Any:
    """The tree of a pattern, as `re` reads it.

    That a later release may read a set in another way is nothing that who gave it could mend.
    """
    with warnings.catch_warnings():
        # No more than this, as another thread may see it.
        warnings.filterwarnings("ignore", "Possible (nested )?set", FutureWarning)
        return _parser.parse(pattern)


@dataclass(slots=True)
class Weaver:
    """Turns a parsed pattern into a net; `first` and `last` say what may stand at an edge of it."""

    flags: int
    net: Net = field(default_factory=Net)
    known: dict[str, list[Way]] = field(default_factory=dict)
    looks: int = 0

    def sequence(self, nodes: Any, at: int, *, first: bool, last: bool) -> int:
        """Nodes one behind the other, from state `at` on; where they lead."""
        count = len(nodes)
        for place, node in enumerate(nodes):
            at = self.node(node, at, first=first and place == 0, last=last and place == count - 1)
        return at

    def node(self, node: Any, at: int, *, first: bool, last: bool) -> int:
        """One node."""
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
        """One of several."""
        end = self.net.state()
        for part in parts:
            begin = self.net.state()
            self.net.free[at].append(begin)
            self.net.free[self.sequence(part, begin, first=first, last=last)].append(end)
        return end

    def repeat(self, least: int, most: int, inner: Any, at: int) -> int:
        """Something `least` to `most` times."""
        for _ in range(least):
            before, at = at, self.sequence(inner, at, first=False, last=False)
            if at == before:
                return at  # nothing, however often
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
        """One character of those that a node matches."""
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
        """The bytes of the characters that a node matches."""
        return [way for span in matched(node, self.flags) for way in utf8(*span)]

    def tail(self, spans: Way, tails: dict[Way, int]) -> int:
        """A state from which these bytes lead to the end; the same for the same."""
        if spans not in tails:
            target = self.tail(spans[1:], tails)
            tails[spans] = self.net.state()
            self.net.edges[tails[spans]].append((spans[0], target))
        return tails[spans]
