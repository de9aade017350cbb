"""Counting, copying and filling tables: answers in which hardly a token is in doubt.

They stand beside the stories as what needs little thought. A method that fills many tokens in one
forward shows here how far that can go. Problems are made without end and by seed, in words and
digits of the zoo's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from outpace.evaluation.generated.problems import Problem, Splits

SPLITS = Splits(("train", "test"), test_every=10)
TOP = 99  # numbers have at most two digits


def problems(split: str, count: int, *, seed: int = 0, start: int = 0) -> list[Problem]:
    """Problems `start` to `start + count` of a split; each depends on its index alone."""
    return [drawn(split, rng) for rng in SPLITS.sources(split, count, seed, start)]


def drawn(split: str, rng: Random) -> Problem:
    """A problem of any kind; one whose question falls into another split is drawn again."""
    while True:
        problem = rng.choice(KINDS)(rng)
        if SPLITS.holds(split, problem.question):
            return problem


def count(rng: Random) -> Problem:
    """Twelve to thirty numbers, up to the bound or down to it, which need not be met."""
    step = rng.randint(1, 5)
    length = rng.randint(12, min(30, (TOP - 1) // step + 1))
    start = min(1 + step * (length - 1) + rng.randrange(step), TOP)
    if rng.random() < 0.5:
        numbers = range(start, 0, -step)
        return Problem(f"Count back from {start} by {step} down to 1.", joined(numbers))
    start = TOP + 1 - start
    numbers = range(start, TOP + 1, step)
    return Problem(f"Count from {start} by {step} up to {TOP}.", joined(numbers))


def copy(rng: Random) -> Problem:
    """The same eight to eighteen numbers again."""
    numbers = joined(rng.randint(10, TOP) for _ in range(rng.randint(8, 18)))
    return Problem(f"Copy: {numbers}", numbers)


def fill(rng: Random) -> Problem:
    """A table of six to ten sums, differences or products, a line each, up to a multiple of ten."""
    op = rng.choice("+-*")
    last = 10 * {"+": rng.randint(1, 8), "-": rng.randint(2, 9), "*": 1}[op]
    first = last + 1 - rng.randint(6, 10)
    other = rng.randint(1, {"+": TOP - last, "-": first - 1, "*": TOP // last}[op])
    lines = [f"{x}{op}{other}={RESULTS[op](x, other)}" for x in range(first, last + 1)]
    return Problem(f"Fill the table n{op}{other} from {first} to {last}.", "\n".join(lines))


def joined(numbers: Iterable[int]) -> str:
    """Numbers with spaces between them."""
    return " ".join(map(str, numbers))


RESULTS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
}
KINDS = (count, copy, fill)
