"""Objects, and arrays of distinct values, as pieces whose states remember what was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from outpace.constraint.pattern import Nfa
from outpace.constraint.pieces import COMMA, JsonPiece, LiteralPiece


class ObjectMember(NamedTuple):
    """A property of an object: its name, and the piece for both name and value."""

    name: str
    part: JsonPiece
    required: bool


class ObjectProgress(NamedTuple):
    """State of a partially written object.

    Attributes:
        place: number of named members that were written or skipped.
        written: members written, up to the count that matters.
        sure: distinct names among them, up to the count that matters.
        names: written names that others depend on.
        other: whether a member without a given name was written.
    """

    place: int = 0
    written: int = 0
    sure: int = 0
    names: frozenset[str] = frozenset()
    other: bool = False


@dataclass(frozen=True, kw_only=True)
class ObjectPiece:
    """An object: named members in order, then any number of `others`.

    Attributes:
        members: named members.
        others: piece of other members.
        least: minimum number of members. Two of the others may have the same name, so all of
            them together count as one here, and each of them for `most`.
        most: maximum number of members.
        needs: names that each name requires.
    """

    members: Sequence[ObjectMember]
    others: JsonPiece | None = None
    least: int = 0
    most: int | None = None
    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def min_width(self) -> float:
        """Width of the braces and required members."""
        return 2 + sum(member.part.min_width for member in self.members if member.required)

    @cached_property
    def dependent_names(self) -> frozenset[str]:
        """Names that others require, or that require others."""
        return frozenset(self.needs).union(*self.needs.values())

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        """Add three states per progress: before a separator, before a choice, and at a member.

        Members are skipped after a comma, so that each member has two successors instead of one per
        later member.
        """
        end, states = net.add_state(), {ObjectProgress(): LiteralPiece("{").add_to_nfa(net, at)}
        choices, begins = dict[ObjectProgress, int](), dict[ObjectProgress, int]()
        progresses, waiting = [*states], list[ObjectProgress]()
        for now in progresses:
            if self.can_end(now):
                net.epsilon_edges[LiteralPiece("}").add_to_nfa(net, states[now])].append(end)
            pick = COMMA.add_to_nfa(net, states[now]) if now.written else states[now]
            net.epsilon_edges[pick].append(progress_state(now, choices, waiting, net))
            while waiting:
                place = waiting.pop()
                for after, part in self.next_members(place):
                    if part is None:
                        target = progress_state(after, choices, waiting, net)
                    else:
                        if after not in begins:
                            begins[after] = net.add_state()
                            done = part.add_to_nfa(net, begins[after])
                            net.epsilon_edges[done].append(
                                progress_state(after, states, progresses, net)
                            )
                        target = begins[after]
                    net.epsilon_edges[choices[place]].append(target)
        return end

    def next_members(
        self, now: ObjectProgress
    ) -> Iterator[tuple[ObjectProgress, JsonPiece | None]]:
        """Yield the possible next progress and its piece, or None if a member is skipped."""
        if now.place < len(self.members):
            name, part, required = self.members[now.place]
            now = now._replace(place=now.place + 1)
            if not required:
                yield now, None
            if now.written != self.most:
                names = now.names | ({name} & self.dependent_names)
                yield self.count_member(now._replace(names=names), 1), part
        elif self.others is not None and now.written != self.most:
            yield self.count_member(now._replace(other=True), not now.other), self.others

    def count_member(self, now: ObjectProgress, sure: int) -> ObjectProgress:
        """Return the progress after one more member."""
        written = now.written + 1 if self.most is not None else 1
        return now._replace(written=written, sure=min(now.sure + sure, self.least))

    def can_end(self, now: ObjectProgress) -> bool:
        """Return whether the object may end here, skipping optional members."""
        return (
            not any(member.required for member in self.members[now.place :])
            and now.sure >= self.least
            and all(self.needs.get(name, now.names) <= now.names for name in now.names)
        )


def progress_state(
    progress: ObjectProgress,
    states: dict[ObjectProgress, int],
    queue: list[ObjectProgress],
    net: Nfa,
) -> int:
    """Return the state of a progress, and queue it if it is new."""
    if progress not in states:
        states[progress] = net.add_state()
        queue.append(progress)
    return states[progress]


@dataclass(frozen=True)
class DistinctArrayPiece:
    """An array of `least` to `most` of some values, each at most once."""

    values: Sequence[JsonPiece]
    least: int
    most: int | None

    @cached_property
    def min_width(self) -> float:
        """Width of the brackets and of the minimum number of values."""
        widths = sorted(value.min_width for value in self.values)
        return 2 + sum(widths[: self.least])

    def add_to_nfa(self, net: Nfa, at: int) -> int:
        """Add a state for each set of written values."""
        end, states = net.add_state(), {frozenset[int](): LiteralPiece("[").add_to_nfa(net, at)}
        waiting = [*states]
        for used in waiting:
            for number in range(len(self.values) if len(used) != self.most else 0):
                if (after := used | {number}) == used:
                    continue
                if after not in states:
                    states[after] = net.add_state()
                    waiting.append(after)
                begin = COMMA.add_to_nfa(net, states[used]) if used else states[used]
                net.epsilon_edges[self.values[number].add_to_nfa(net, begin)].append(states[after])
            if len(used) >= self.least:
                net.epsilon_edges[LiteralPiece("]").add_to_nfa(net, states[used])].append(end)
        return end
