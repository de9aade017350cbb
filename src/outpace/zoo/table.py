"""Counting, copying and filling tables: answers in which hardly a token is in doubt.

They stand beside the stories as what needs little thought. A method that fills many tokens in one
forward shows here how far that can go. Problems are made without end and by seed, in words and
digits of the zoo's vocabulary.
"""

from collections.abc import Callable
from random import Random
from zlib import crc32

from outpace.zoo.story import NAMES, Problem

SPLITS = ("train", "test")
TEST_EVERY = 10  # one question of so many belongs to the test split
TOP = 99  # numbers have at most two digits


def problems(split: str, count: int, *, seed: int = 0, start: int = 0) -> list[Problem]:
    """Problems `start` to `start + count` of a split; each depends on its index alone."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    if count < 0 or start < 0:
        raise ValueError(f"count and start must not be negative, got {count} and {start}")
    return [_problem(split, Random(f"{split}/{seed}/{i}")) for i in range(start, start + count)]


def _problem(split: str, rng: Random) -> Problem:
    """Draw until the question falls into the split, which a hash of its text alone decides."""
    while True:
        problem = rng.choice(KINDS)(rng)
        if (crc32(problem.question.encode()) % TEST_EVERY == 0) == (split == "test"):
            return problem


def count(rng: Random) -> Problem:
    """Twelve to thirty numbers, each a step above or below the one before."""
    step = rng.choice((1, 1, 2, 3))
    length = rng.randint(12, min(30, TOP // step))
    low = rng.randint(1, TOP - step * (length - 1))
    numbers = [low + step * i for i in range(length)]
    back = rng.random() < 0.3
    first, last = (numbers[-1], low) if back else (low, numbers[-1])
    by = f" by {step}" if step > 1 else ""
    question = f"Count {'back ' * back}from {first} to {last}{by}."
    return Problem(question, " ".join(map(str, reversed(numbers) if back else numbers)))


def copy(rng: Random) -> Problem:
    """The same list again: six to twelve names, each with a number."""
    names = rng.sample(NAMES, rng.randint(6, 12))
    entries = ", ".join(f"{name} {rng.randint(2, TOP)}" for name in names)
    return Problem(f"Copy: {entries}", entries)


def fill(rng: Random) -> Problem:
    """A table of six to eleven sums, differences or products, a line each."""
    rows = rng.randint(6, 11)
    op = rng.choice("+-*")
    if op == "*":
        other = rng.randint(2, 8)
        first = rng.randint(1, 12 - rows + 1)
    else:
        other = rng.randint(2, 30)
        bounds = (1, TOP - other - rows) if op == "+" else (other + 1, TOP - rows)
        first = rng.randint(*bounds)
    numbers = range(first, first + rows)
    lines = [f"{x}{op}{other}={RESULTS[op](x, other)}" for x in numbers]
    return Problem(f"Fill the table n{op}{other} from {first} to {numbers[-1]}.", "\n".join(lines))


RESULTS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
}
KINDS = (count, copy, fill)
