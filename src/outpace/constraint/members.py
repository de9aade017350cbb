"""Objects, and arrays of different values, as parts of a text that remember what was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from outpace.constraint.pattern import Net
from outpace.constraint.pieces import NEXT, Piece, Text


class Member(NamedTuple):
    """A property that an object may have: its name, and the part for both name and value."""

    name: str
    part: Piece
    required: bool


class Progress(NamedTuple):
    """How far an object is written.

    Attributes:
        place: how many of its named members were written or left out.
        written: members that were written, as far as that matters.
        sure: different names among them, as far as that matters.
        names: names that were written, of those that others depend on.
        other: whether a member without a given name was written.
    """

    place: int = 0
    written: int = 0
    sure: int = 0
    names: frozenset[str] = frozenset()
    other: bool = False


@dataclass(frozen=True, kw_only=True)
class Members:
    """An object: named members in their order, then any number of `others`.

    Attributes:
        least, most: how many members there are. Two of the others may have the same name, so that
            one of them counts for `least`, and all of them for `most`.
        needs: names that must be there where a name is.
    """

    members: Sequence[Member]
    others: Piece | None = None
    least: int = 0
    most: int | None = None
    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def width(self) -> float:
        """That of braces and required members."""
        return 2 + sum(member.part.width for member in self.members if member.required)

    @cached_property
    def watched(self) -> frozenset[str]:
        """Names that others depend on, or that depend on others."""
        return frozenset(self.needs).union(*self.needs.values())

    def weave(self, net: Net, at: int) -> int:
        """A state for each progress, one where its next member is picked, and one where it begins.

        Members are left out after a comma, so that a member is followed by two ways and not by one
        to each later member.
        """
        end, known = net.state(), {Progress(): Text("{").weave(net, at)}
        picks, begins = dict[Progress, int](), dict[Progress, int]()
        written, waiting = [*known], list[Progress]()
        for now in written:
            if self.may_end(now):
                net.free[Text("}").weave(net, known[now])].append(end)
            pick = NEXT.weave(net, known[now]) if now.written else known[now]
            net.free[pick].append(reached(now, picks, waiting, net))
            while waiting:
                place = waiting.pop()
                for after, part in self.steps(place):
                    if part is None:
                        target = reached(after, picks, waiting, net)
                    else:
                        if after not in begins:
                            begins[after] = net.state()
                            done = part.weave(net, begins[after])
                            net.free[done].append(reached(after, known, written, net))
                        target = begins[after]
                    net.free[picks[place]].append(target)
        return end

    def steps(self, now: Progress) -> Iterator[tuple[Progress, Piece | None]]:
        """What may come next, and its part; None where a member is left out."""
        if now.place < len(self.members):
            name, part, required = self.members[now.place]
            now = now._replace(place=now.place + 1)
            if not required:
                yield now, None
            if now.written != self.most:
                names = now.names | ({name} & self.watched)
                yield self.counted(now._replace(names=names), 1), part
        elif self.others is not None and now.written != self.most:
            yield self.counted(now._replace(other=True), not now.other), self.others

    def counted(self, now: Progress, sure: int) -> Progress:
        """A progress with one member more, as far as that matters."""
        written = now.written + 1 if self.most is not None else 1
        return now._replace(written=written, sure=min(now.sure + sure, self.least))

    def may_end(self, now: Progress) -> bool:
        """Whether an object may end there, without what it may leave out."""
        return (
            not any(member.required for member in self.members[now.place :])
            and now.sure >= self.least
            and all(self.needs.get(name, now.names) <= now.names for name in now.names)
        )


def reached(
    progress: Progress, states: dict[Progress, int], waiting: list[Progress], net: Net
) -> int:
    """The state of a progress; it is waited for where it is new."""
    if progress not in states:
        states[progress] = net.state()
        waiting.append(progress)
    return states[progress]


@dataclass(frozen=True)
class Distinct:
    """An array of `least` to `most` of some values, each of them once."""

    values: Sequence[Piece]
    least: int
    most: int | None

    @cached_property
    def width(self) -> float:
        """That of the brackets, and of as many values as it must have."""
        widths = sorted(value.width for value in self.values)
        return 2 + sum(widths[: self.least])

    def weave(self, net: Net, at: int) -> int:
        """A state for each set of values that were written."""
        end, known = net.state(), {frozenset[int](): Text("[").weave(net, at)}
        waiting = [*known]
        for used in waiting:
            for number in range(len(self.values) if len(used) != self.most else 0):
                if (after := used | {number}) == used:
                    continue
                if after not in known:
                    known[after] = net.state()
                    waiting.append(after)
                begin = NEXT.weave(net, known[used]) if used else known[used]
                net.free[self.values[number].weave(net, begin)].append(known[after])
            if len(used) >= self.least:
                net.free[Text("]").weave(net, known[used])].append(end)
        return end
