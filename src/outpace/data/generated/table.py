"""Generated counting, copying and table problems: answers with hardly an uncertain token.

Compared with the stories they need little reasoning, and show how far a method that fills many
tokens per forward can go. They use the words and digits of the zoo's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from outpace.data.generated import Problem, ProblemSplits

TABLE_SPLITS = ProblemSplits(("train", "test"), test_every=10)
MAX_TABLE_NUMBER = 99  # numbers have at most two digits


def table_problems(split: str, count: int, *, seed: int = 0, start: int = 0) -> list[Problem]:
    """Return problems `start` to `start + count` of a split; each depends only on its index."""
    return [
        draw_table_problem(split, rng)
        for rng in TABLE_SPLITS.random_sources(split, count, seed, start)
    ]


def draw_table_problem(split: str, rng: Random) -> Problem:
    """Draw a problem of any kind; questions of another split are drawn again."""
    while True:
        problem = rng.choice(TABLE_KINDS)(rng)
        if TABLE_SPLITS.contains(split, problem.question):
            return problem


def draw_counting(rng: Random) -> Problem:
    step = rng.randint(1, 5)
    length = rng.randint(12, min(30, (MAX_TABLE_NUMBER - 1) // step + 1))
    start = min(1 + step * (length - 1) + rng.randrange(step), MAX_TABLE_NUMBER)
    if rng.random() < 0.5:
        numbers = range(start, 0, -step)
        return Problem(f"Count back from {start} by {step} down to 1.", join_numbers(numbers))
    start = MAX_TABLE_NUMBER + 1 - start
    numbers = range(start, MAX_TABLE_NUMBER + 1, step)
    return Problem(f"Count from {start} by {step} up to {MAX_TABLE_NUMBER}.", join_numbers(numbers))


def draw_copying(rng: Random) -> Problem:
    numbers = join_numbers(rng.randint(10, MAX_TABLE_NUMBER) for _ in range(rng.randint(8, 18)))
    return Problem(f"Copy: {numbers}", numbers)


def draw_filling(rng: Random) -> Problem:
    op = rng.choice("+-*")
    last = 10 * {"+": rng.randint(1, 8), "-": rng.randint(2, 9), "*": 1}[op]
    first = last + 1 - rng.randint(6, 10)
    other = rng.randint(
        1, {"+": MAX_TABLE_NUMBER - last, "-": first - 1, "*": MAX_TABLE_NUMBER // last}[op]
    )
    lines = [f"{x}{op}{other}={OPERATION_RESULTS[op](x, other)}" for x in range(first, last + 1)]
    return Problem(f"Fill the table n{op}{other} from {first} to {last}.", "\n".join(lines))


def join_numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


OPERATION_RESULTS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
}
TABLE_KINDS = (draw_counting, draw_copying, draw_filling)
