"""Generated counting, copying and table problems: answers with hardly an uncertain token.

Compared with the stories they need little reasoning, and show how far a method that fills many
tokens per forward can go. They use the words and digits of the zoo's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from outpace.evaluation.generated.problems import Problem, Splits

SPLITS = Splits(("train", "test"), test_every=10)
TOP = 99  # numbers have at most two digits


def problems(split: str, count: int, *, seed: int = 0, start: int = 0) -> list[Problem]:
    """Return problems `start` to `start + count` of a split; each depends only on its index."""
    return [drawn(split, rng) for rng in SPLITS.sources(split, count, seed, start)]


def drawn(split: str, rng: Random) -> Problem:
    """Draw a problem of any kind; questions of another split are drawn again."""
    while True:
        problem = rng.choice(KINDS)(rng)
        if SPLITS.holds(split, problem.question):
            return problem


def count(rng: Random) -> Problem:
    """Draw a sequence of twelve to thirty numbers, upwards or downwards to a bound."""
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
    """Draw eight to eighteen numbers to be copied."""
    numbers = joined(rng.randint(10, TOP) for _ in range(rng.randint(8, 18)))
    return Problem(f"Copy: {numbers}", numbers)


def fill(rng: Random) -> Problem:
    """Draw a table of six to ten sums, differences or products, one per line."""
    op = rng.choice("+-*")
    last = 10 * {"+": rng.randint(1, 8), "-": rng.randint(2, 9), "*": 1}[op]
    first = last + 1 - rng.randint(6, 10)
    other = rng.randint(1, {"+": TOP - last, "-": first - 1, "*": TOP // last}[op])
    lines = [f"{x}{op}{other}={RESULTS[op](x, other)}" for x in range(first, last + 1)]
    return Problem(f"Fill the table n{op}{other} from {first} to {last}.", "\n".join(lines))


def joined(numbers: Iterable[int]) -> str:
    """Return numbers separated by spaces."""
    return " ".join(map(str, numbers))


RESULTS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
}
KINDS = (count, copy, fill)
