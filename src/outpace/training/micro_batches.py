"""Assignment of examples to steps, processes and micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

from outpace.training.data import Example
from outpace.training.loop import Loop

NumberedExample = tuple[int, Example]
"""An example's number in the data order, and the example."""

SplitItem = TypeVar("SplitItem")


class MicroBatches:
    """Examples of each step, a function of the settings and the lengths of earlier examples."""

    def __init__(self, loop: Loop, processes: int, example: Callable[[int], Example]) -> None:
        """Initialize; `example` loads an example by number."""
        self.loop, self.processes, self.load_example = loop, processes, example
        self.first_examples = {0: 0}
        """Number of the first example of each step visited so far."""

    def first_example(self, step: int) -> int:
        """Return the number of a step's first example.

        With `tokens` set, the step before must have been visited.
        """
        return step * self.loop.batch if self.loop.tokens is None else self.first_examples[step]

    def micro_batches(self, step: int, rank: int) -> list[list[NumberedExample]]:
        """Return the examples of one process in a step, by micro-batch."""
        processes, accumulation = self.processes, self.loop.accumulation
        if self.loop.tokens is None and not self.loop.balance:
            numbers = range(self.first_example(step), self.first_example(step + 1))
            mine = [(n, self.load_example(n)) for n in numbers[rank::processes]]
            return split_evenly(mine, accumulation)
        examples = self.all_examples(step)
        if self.loop.balance:
            return balance_tokens(examples, processes * accumulation)[rank::processes]
        return split_evenly(examples[rank::processes], accumulation)

    def all_examples(self, step: int) -> list[NumberedExample]:
        """Return all examples of a step, and record where the next one begins."""
        # With `tokens`, examples are taken until they contain that many tokens. Every process loads
        # all of them, because their lengths decide the assignment.
        at, wanted = self.first_example(step), self.loop.tokens
        if wanted is None:
            return [(n, self.load_example(n)) for n in range(at, at + self.loop.batch)]
        found: list[NumberedExample] = []
        while wanted > 0:
            found.append((at + len(found), self.load_example(at + len(found))))
            wanted -= len(found[-1][1])
        self.first_examples[step + 1] = at + len(found)
        return found


def split_evenly(items: Sequence[SplitItem], count: int) -> list[list[SplitItem]]:
    size, rest = divmod(len(items), count)
    ends = [size * n + min(n, rest) for n in range(count + 1)]
    return [[*items[a:b]] for a, b in zip(ends, ends[1:], strict=False)]


def balance_tokens(examples: Sequence[NumberedExample], count: int) -> list[list[NumberedExample]]:
    """Split examples into `count` parts of about equal token counts."""
    # Greedy: longest first, each to the smallest part so far. The largest part exceeds the optimum
    # by at most a third (Graham, 1969). Each part is sorted by example number.
    parts: list[list[NumberedExample]] = [[] for _ in range(count)]
    least = [(0, number) for number in range(count)]
    for each in sorted(examples, key=lambda item: -len(item[1])):
        tokens, number = heapq.heappop(least)
        parts[number].append(each)
        heapq.heappush(least, (tokens + len(each[1]), number))
    return [sorted(part, key=lambda item: item[0]) for part in parts]
