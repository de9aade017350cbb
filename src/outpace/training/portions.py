"""Which examples a step learns, and how they are shared out to processes and their portions."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

from outpace.training.data import Example
from outpace.training.loop import Loop

Numbered = tuple[int, Example]
"""An example with its number."""

Item = TypeVar("Item")


class Portions:
    """Examples of each step: a function of the settings and the lengths of what came before.

    Attributes:
        begins: number of the first example of a step, of those that are known.
    """

    def __init__(self, loop: Loop, processes: int, example: Callable[[int], Example]) -> None:
        """`example` gives example number n."""
        self.loop, self.processes, self.example = loop, processes, example
        self.begins = {0: 0}

    def begin(self, step: int) -> int:
        """Number of the first example of a step; with `tokens` the step before must be known."""
        return step * self.loop.batch if self.loop.tokens is None else self.begins[step]

    def of(self, step: int, rank: int) -> list[list[Numbered]]:
        """What a process feeds in a step, portion by portion."""
        processes, portions = self.processes, self.loop.accumulation
        if self.loop.tokens is None and not self.loop.balance:
            numbers = range(self.begin(step), self.begin(step + 1))
            mine = [(n, self.example(n)) for n in numbers[rank::processes]]
            return split(mine, portions)
        every = self.every(step)
        if self.loop.balance:
            return even(every, processes * portions)[rank::processes]
        return split(every[rank::processes], portions)

    def every(self, step: int) -> list[Numbered]:
        """All examples of a step; with `tokens` so many that they hold as many, and where it ends.

        All processes read them, to know their lengths.
        """
        at, wanted = self.begin(step), self.loop.tokens
        if wanted is None:
            return [(n, self.example(n)) for n in range(at, at + self.loop.batch)]
        found: list[Numbered] = []
        while wanted > 0:
            found.append((at + len(found), self.example(at + len(found))))
            wanted -= len(found[-1][1])
        self.begins[step + 1] = at + len(found)
        return found


def split(items: Sequence[Item], count: int) -> list[list[Item]]:
    """Items in so many parts, one behind the other; the first ones have one more of a rest."""
    size, rest = divmod(len(items), count)
    ends = [size * n + min(n, rest) for n in range(count + 1)]
    return [[*items[a:b]] for a, b in zip(ends, ends[1:], strict=False)]


def even(examples: Sequence[Numbered], count: int) -> list[list[Numbered]]:
    """Examples in so many parts of about as many tokens: each to the least so far, longest first.

    The largest has at most a third more than the best way would leave it (Graham, 1969). Within a
    part they stand in the order of their numbers.
    """
    parts: list[list[Numbered]] = [[] for _ in range(count)]
    least = [(0, number) for number in range(count)]
    for each in sorted(examples, key=lambda item: -len(item[1])):
        tokens, number = heapq.heappop(least)
        parts[number].append(each)
        heapq.heappush(least, (tokens + len(each[1]), number))
    return [sorted(part, key=lambda item: item[0]) for part in parts]
